// The log lines around an incident: first those of the culprit, then those of other ranks, in separate lists. Without a culprit,
// one list has the lines of all ranks.

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

import type { Resource } from "../../api/resource";
import type { IncidentDocument, IncidentLineDocument, IncidentLogsDocument } from "../../api/documents";
import { clock } from "../../app/preferences";
import { hrefOf } from "../../app/location";
import { clockText, daysText, fullTimeText, sentence } from "../../ui/format";
import { Section } from "../../ui/section";
import { Loaded } from "../../ui/states";

function Lines({ lines, title }: { lines: readonly IncidentLineDocument[]; title: string }): JSX.Element {
  const zone = clock.value;
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    // scroll to the line that shows the cause, else to the end
    const found = box.current;
    const causeLine = found?.querySelector<HTMLElement>(".is-cause");
    if (found !== null) {
      found.scrollTop = causeLine == null ? found.scrollHeight : causeLine.offsetTop - found.clientHeight / 2;
    }
  }, [lines]);
  return (
    <div class="moment-lines" ref={box} tabIndex={0} role="region" aria-label={title}>
      {lines.map((one, index) => (
        <div key={index} class={one.is_cause ? "moment-line is-cause" : "moment-line"}>
          <time class="log-time" title={fullTimeText(one.at_unix_s, zone)}>
            {clockText(one.at_unix_s, zone)}
          </time>
          <span class="log-rank" title={one.host}>
            {one.rank}
          </span>
          <span class="log-text">{one.line}</span>
        </div>
      ))}
    </div>
  );
}

function Cause({ logs }: { logs: IncidentLogsDocument }): JSX.Element | null {
  return logs.cause_line === "" ? null : (
    <p class="moment-cause" data-label={logs.label}>
      Cause in the logs: <strong>{logs.label}</strong>
      {logs.cause_rank === null ? "" : ` (rank ${logs.cause_rank})`}
      {logs.action === "" ? "" : <span class="faint">, recommended action: {logs.action.replaceAll("_", " ")}</span>}:{" "}
      <span class="log-text">{logs.cause_line}</span>
    </p>
  );
}

function Groups({ logs }: { logs: IncidentLogsDocument }): JSX.Element {
  const isNamed = logs.culprit_text !== "";
  return (
    <div class="stack tight">
      <Cause logs={logs} />
      {logs.problem === "" ? null : <p class="soft moment-problem">{sentence(logs.problem)}.</p>}
      {logs.culprit_lines.length === 0 ? null : (
        <div data-lines="culprit">
          <h3>Culprit: {logs.culprit_text}</h3>
          <Lines lines={logs.culprit_lines} title={`Lines of ${logs.culprit_text}`} />
        </div>
      )}
      {logs.other_lines.length === 0 ? null : (
        <div data-lines="others">
          <h3>{isNamed ? "Other ranks" : "All ranks; no culprit identified"}</h3>
          <Lines lines={logs.other_lines} title={isNamed ? "Lines of other ranks" : "Lines of all ranks"} />
        </div>
      )}
    </div>
  );
}

interface MomentLogsProps {
  incident: IncidentDocument;
  logs: Resource<IncidentLogsDocument>;
}

export function MomentLogs({ incident, logs }: MomentLogsProps): JSX.Element {
  const shown = logs.data === null ? [] : [...logs.data.culprit_lines, ...logs.data.other_lines].map((one) => one.at_unix_s);
  const days = shown.length === 0 ? "" : `, ${daysText(Math.min(...shown), Math.max(...shown), clock.value)}`;
  return (
    <Section
      title="Log lines around the incident"
      note={`round ${incident.round}${days}`}
      tools={
        <>
          {incident.ranks.length === 0 ? null : (
            <a href={hrefOf("logs", { round: incident.round, ranks: incident.ranks.slice(0, 16).join(",") })}>lines of the culprit</a>
          )}
          <a href={hrefOf("logs", { round: incident.round })}>all lines of the round</a>
        </>
      }
    >
      <Loaded resource={logs} lines={8}>
        {(document) => <Groups logs={document} />}
      </Loaded>
    </Section>
  );
}
