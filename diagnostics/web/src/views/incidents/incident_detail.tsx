// One incident: what happened, what was done phase by phase, what it cost, on what evidence.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { AuditDocument, FailureDocument, IncidentDocument, VerdictDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { PartsBar } from "../../ui/bars";
import { Badge } from "../../ui/badge";
import { Duration, Fact, Facts, Figure, TimeText } from "../../ui/figures";
import { countOf, countText, durationText, percentText, ranksText, sentence } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { HostLinks, Lines, StateBadge } from "./parts";
import { VerdictBody } from "./verdict_detail";

function phaseLabel(name: string): string {
  return name.replaceAll("_", " ");
}

const NOTE_LABELS: Record<string, string> = {
  check: "checked again", median_step_s: "a step took", num_hosts: "hosts after it", over_unix_s: "over", pairs: "pairs timed",
};

/** A figure that the driver keeps with an incident, as people read it. */
function Note({ name, text }: { name: string; text: string }): JSX.Element {
  const value = Number(text);
  if (!name.endsWith("_s") || Number.isNaN(value)) {
    return <>{text}</>;
  }
  return name.endsWith("_unix_s") ? <TimeText at={value} /> : <Duration seconds={value} />;
}

function Recovery({ incident }: { incident: IncidentDocument }): JSX.Element {
  const over = incident.phases.filter((phase) => phase.seconds !== null);
  const current = incident.state === "open" ? incident.phases.find((phase) => phase.seconds === null) : undefined;
  const parts = over.map((phase) => ({
    key: phase.name,
    label: phaseLabel(phase.name),
    value: Math.max(0, phase.seconds ?? 0),
    text: durationText(phase.seconds),
  }));
  const note = incident.down_s === null ? "not over" : `${durationText(incident.down_s)} from failure to the next step`;
  return (
    <Section title="Recovery" note={note}>
      {parts.length === 0 ? (
        <p class="soft">No phase is over yet.</p>
      ) : (
        <PartsBar caption="Seconds of each phase of the recovery" parts={parts} />
      )}
      {current === undefined ? null : (
        <p class="lead">
          Now: {phaseLabel(current.name)}
          {current.began_unix_s === null ? null : (
            <span class="faint">
              {" "}
              since <TimeText at={current.began_unix_s} />
            </span>
          )}
        </p>
      )}
    </Section>
  );
}

const failureColumns = (round: number): readonly Column<FailureDocument>[] => [
  {
    key: "role",
    label: "Role",
    render: (row) => (
      <Badge tone={row.is_cascade ? "quiet" : "bad"} shape={row.is_cascade ? "ring" : "octagon"}>
        {row.is_cascade ? "followed" : "root"}
      </Badge>
    ),
  },
  { key: "rank", label: "Rank", isNumber: true, render: (row) => <a href={hrefOf("grid", { rank: row.rank, round })}>{row.rank}</a> },
  { key: "host", label: "Host", render: (row) => <a href={hrefOf(["hosts", row.host])}>{row.host}</a> },
  { key: "at", label: "When", render: (row) => <TimeText at={row.at_unix_s} /> },
  { key: "exit", label: "Ended", render: (row) => row.exit_text },
  { key: "label", label: "Label", render: (row) => row.label },
  { key: "culprit", label: "Names", render: (row) => row.culprit },
  { key: "line", label: "Line", className: "wide", render: (row) => <span class="log-text">{row.line}</span> },
];

function Failures({ incident }: { incident: IncidentDocument }): JSX.Element | null {
  if (incident.failures.length === 0) {
    return null;
  }
  const logs = hrefOf("logs", { round: incident.round, ranks: incident.ranks.slice(0, 16).join(",") });
  return (
    <Section
      title="How ranks ended"
      note={`${countOf(incident.failures.filter((one) => !one.is_cascade).length, "root cause")} first`}
      tools={<a href={logs}>logs of the round</a>}
    >
      <Table
        caption="Failures of ranks, root causes first"
        columns={failureColumns(incident.round)}
        rows={incident.failures}
        rowKey={(row) => `${row.rank} ${row.at_unix_s} ${row.exit_text}`}
        rowClass={(row) => (row.is_cascade ? "is-faint" : "")}
      />
    </Section>
  );
}

function Costs({ incident }: { incident: IncidentDocument }): JSX.Element {
  return (
    <dl class="figures">
      <Figure label="Down" value={<Duration seconds={incident.down_s} />} note="from failure to the next step" />
      <Figure label="Noticed after" value={<Duration seconds={incident.detected_unix_s - incident.began_unix_s} />} note="from failure to knowing" />
      <Figure
        label="Steps lost"
        value={countText(incident.steps_lost)}
        note={
          incident.resumed_step === null
            ? `last step ${countText(incident.last_step)}`
            : `${countText(incident.last_step)}, resumed at ${countText(incident.resumed_step)}`
        }
      />
      <Figure
        label="Training time"
        value={percentText(incident.effective_time_ratio)}
        note="of the job when it was closed"
      />
      <Figure
        label="Round"
        value={countText(incident.round)}
        note={incident.next_round === null ? "no later one yet" : `followed by ${incident.next_round}`}
      />
    </dl>
  );
}

function Trail({ incident }: { incident: IncidentDocument }): JSX.Element {
  const found = useResource<AuditDocument>("audit", {}, "incidents");
  const ends = incident.began_unix_s + (incident.down_s ?? 0) + 60;
  const named = new Set([incident.incident_id, incident.verdict_id, ...incident.hosts]);
  return (
    <Section title="Audit trail" tools={<a href={hrefOf("audit")}>all</a>}>
      <Loaded resource={found} lines={2}>
        {(document) => {
          const near = document.entries.filter(
            (entry) => named.has(entry.target) || (entry.at_unix_s >= incident.began_unix_s && entry.at_unix_s <= ends),
          );
          return near.length === 0 ? (
            <p class="soft">Nothing was asked for or decided after a verdict: the driver acted on the failure itself.</p>
          ) : (
            <Facts>
              {near.map((entry) => (
                <Fact key={`${entry.at_unix_s} ${entry.action} ${entry.target}`} label={`${entry.source}, ${entry.actor}`}>
                  <TimeText at={entry.at_unix_s} /> {entry.action} {entry.target}: {entry.result}
                  {entry.reason === "" ? null : <span class="faint"> ({entry.reason})</span>}
                </Fact>
              ))}
            </Facts>
          );
        }}
      </Loaded>
    </Section>
  );
}

function VerdictBehind({ id }: { id: string }): JSX.Element {
  const found = useResource<VerdictDocument>(`verdicts/${encodeURIComponent(id)}`, {}, "incidents");
  return (
    <Section title="The verdict behind it" tools={<a href={hrefOf(["incidents", "verdicts", id])}>{id}</a>}>
      <Loaded resource={found}>{(verdict) => <VerdictBody verdict={verdict} />}</Loaded>
    </Section>
  );
}

function Detail({ incident }: { incident: IncidentDocument }): JSX.Element {
  const notes = Object.entries(incident.notes);
  return (
    <>
      <div class="stack tight">
        <p class="lead reading">{incident.reason}</p>
        <p class="soft">
          Done about it: <strong>{incident.action}</strong>
        </p>
      </div>
      <Costs incident={incident} />
      <Recovery incident={incident} />
      <Failures incident={incident} />
      <div class="columns">
        <Section title="Evidence" note={incident.confidence === "" ? undefined : `confidence: ${incident.confidence}`}>
          <Lines lines={incident.evidence} none="None is recorded beyond the reason above." />
        </Section>
        <Section title="Where and who">
          <Facts>
            <Fact label="hosts">
              <HostLinks hosts={incident.hosts} most={8} />
            </Fact>
            <Fact label="ranks">
              {incident.ranks.length === 0 ? "none named" : <a href={hrefOf("grid", { rank: incident.ranks[0], round: incident.round })}>{ranksText(incident.ranks, 10)}</a>}
            </Fact>
            <Fact label="its round">
              <span class="links">
                <span>{incident.round}</span>
                <a href={hrefOf("heat", { round: incident.round, rank: incident.ranks[0], step: incident.last_step })}>heat map</a>
                <a href={hrefOf("timeline", { round: incident.round, first: incident.last_step, last: incident.last_step })}>timeline</a>
                <a href={hrefOf("grid", { round: incident.round })}>ranks</a>
                <a href={hrefOf("logs", { round: incident.round })}>logs</a>
              </span>
            </Fact>
            <Fact label="began">
              <TimeText at={incident.began_unix_s} />
            </Fact>
            <Fact label="noticed">
              <TimeText at={incident.detected_unix_s} />
            </Fact>
            <Fact label="driver">{incident.driver}</Fact>
            {notes.map(([name, text]) => (
              <Fact key={name} label={NOTE_LABELS[name] ?? phaseLabel(name)}>
                <Note name={name} text={text} />
              </Fact>
            ))}
          </Facts>
        </Section>
        {incident.verdict_id === "" ? null : <VerdictBehind id={incident.verdict_id} />}
        <Trail incident={incident} />
      </div>
    </>
  );
}

export function IncidentDetail({ id }: { id: string }): JSX.Element {
  const found = useResource<IncidentDocument>(`incidents/${encodeURIComponent(id)}`, {}, "incidents");
  return (
    <>
      <p class="crumbs">
        <a href={hrefOf("incidents")}>Incidents</a> / {id}
      </p>
      <ViewHead title={sentence(found.data?.kind_text ?? `incident ${id}`)} note={found.data === null ? undefined : <StateBadge state={found.data.state} />} />
      <Loaded resource={found}>{(incident) => <Detail incident={incident} />}</Loaded>
    </>
  );
}
