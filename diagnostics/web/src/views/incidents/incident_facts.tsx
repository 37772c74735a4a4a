// Parts of the page of an incident: costs, phases of the recovery, hosts and ranks, and how ranks ended.

import type { JSX } from "preact";

import type { FailureDocument, IncidentDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { PartsBar } from "../../ui/bars";
import { Badge } from "../../ui/badge";
import { Duration, Fact, Facts, Figure, TimeText } from "../../ui/figures";
import { countOf, countText, durationText, percentText, ranksText } from "../../ui/format";
import { Section } from "../../ui/section";
import { Table, type Column } from "../../ui/table";
import { HostLinks } from "./parts";

export function Costs({ incident }: { incident: IncidentDocument }): JSX.Element {
  return (
    <dl class="figures">
      <Figure label="Downtime" value={<Duration seconds={incident.down_s} />} note="from the failure to the next step" />
      <Figure label="Detected after" value={<Duration seconds={incident.detected_unix_s - incident.began_unix_s} />} note="from the failure to its detection" />
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
        note="of the job when the incident was closed"
      />
      <Figure
        label="Round"
        value={countText(incident.round)}
        note={incident.next_round === null ? "no later round yet" : `followed by ${incident.next_round}`}
      />
    </dl>
  );
}

function phaseLabel(name: string): string {
  return name.replaceAll("_", " ");
}

export function Recovery({ incident }: { incident: IncidentDocument }): JSX.Element {
  const over = incident.phases.filter((phase) => phase.seconds !== null);
  const current = incident.state === "open" ? incident.phases.find((phase) => phase.seconds === null) : undefined;
  const parts = over.map((phase) => ({
    key: phase.name,
    label: phaseLabel(phase.name),
    value: Math.max(0, phase.seconds ?? 0),
    text: durationText(phase.seconds),
  }));
  return (
    <>
      {parts.length === 0 ? null : <PartsBar caption="Duration of each phase of the recovery" parts={parts} />}
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
    </>
  );
}

const NOTE_LABELS: Record<string, string> = {
  check: "checked again", median_step_s: "median step time", num_hosts: "hosts afterwards", over_unix_s: "ended", pairs: "pairs timed",
};

/** A value that the driver stored with an incident, formatted by the unit in its name. */
function Note({ name, text }: { name: string; text: string }): JSX.Element {
  const value = Number(text);
  if (!name.endsWith("_s") || Number.isNaN(value)) {
    return <>{text}</>;
  }
  return name.endsWith("_unix_s") ? <TimeText at={value} /> : <Duration seconds={value} />;
}

export function WhereAndWho({ incident }: { incident: IncidentDocument }): JSX.Element {
  return (
    <Section title="Hosts and ranks">
      <Facts>
        <Fact label="hosts">
          {incident.hosts.length === 0 ? "none identified" : <HostLinks hosts={incident.hosts} most={8} />}
        </Fact>
        <Fact label="ranks">
          {incident.ranks.length === 0 ? "none identified" : <a href={hrefOf("ranks", { rank: incident.ranks[0], round: incident.round })}>{ranksText(incident.ranks, 10)}</a>}
        </Fact>
        <Fact label="round">
          <span class="links">
            <span>{incident.round}</span>
            <a href={hrefOf("timeline", { round: incident.round, first: incident.last_step, last: incident.last_step })}>timeline</a>
            {incident.next_round === null ? null : <a href={hrefOf("ranks", { round: incident.next_round })}>next: {incident.next_round}</a>}
          </span>
        </Fact>
        {incident.driver === "" ? null : <Fact label="driver">{incident.driver}</Fact>}
        {Object.entries(incident.notes).map(([name, text]) => (
          <Fact key={name} label={NOTE_LABELS[name] ?? phaseLabel(name)}>
            <Note name={name} text={text} />
          </Fact>
        ))}
      </Facts>
    </Section>
  );
}

const failureColumns = (round: number): readonly Column<FailureDocument>[] => [
  {
    key: "role",
    label: "Role",
    render: (row) => (
      <Badge tone={row.is_cascade ? "quiet" : "bad"} shape={row.is_cascade ? "ring" : "octagon"}>
        {row.is_cascade ? "cascade" : "root"}
      </Badge>
    ),
  },
  { key: "rank", label: "Rank", isNumber: true, render: (row) => <a href={hrefOf("ranks", { rank: row.rank, round })}>{row.rank}</a> },
  { key: "host", label: "Host", render: (row) => <a href={hrefOf(["hosts", row.host])}>{row.host}</a> },
  { key: "at", label: "When", render: (row) => <TimeText at={row.at_unix_s} /> },
  { key: "exit", label: "Exit", render: (row) => row.exit_text },
  { key: "label", label: "Label", render: (row) => row.label },
  { key: "culprit", label: "Culprit", render: (row) => row.culprit },
  { key: "line", label: "Line", className: "wide", render: (row) => <span class="log-text">{row.line}</span> },
];

export function Failures({ incident }: { incident: IncidentDocument }): JSX.Element | null {
  if (incident.failures.length === 0) {
    return null;
  }
  return (
    <Section
      title="How ranks ended"
      note={`${countOf(incident.failures.filter((one) => !one.is_cascade).length, "root cause")} first`}
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
