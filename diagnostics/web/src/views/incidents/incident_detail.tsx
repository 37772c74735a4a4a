// The page of one incident: events, logs, ranks, heat map, runbook and notifications, and a text for a ticket.

import "./incidents.css";

import type { JSX } from "preact";

import { useResource, type Resource } from "../../api/resource";
import type {
  AuditDocument, FailureDocument, IncidentDocument, IncidentLogsDocument, NoteDocument, NotesDocument, RunbookDocument, StoryDocument, VerdictDocument,
} from "../../api/documents";
import { job } from "../../app/job";
import { hrefOf } from "../../app/location";
import { clock } from "../../app/preferences";
import { PartsBar } from "../../ui/bars";
import { Badge } from "../../ui/badge";
import { CopyButton } from "../../ui/controls";
import { Duration, Fact, Facts, Figure, TimeText } from "../../ui/figures";
import { countOf, countText, daysText, durationText, percentText, ranksText, sentence } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { ActionBar } from "../actions/action_bar";
import { RunbookSteps, runbookHref } from "../runbooks/steps";
import { MomentLogs } from "./moment_logs";
import { MomentRanks, MomentHeat } from "./moment_pictures";
import { HostLinks, Lines, StateBadge } from "./parts";
import { auditOf, InOrder, storyInOrder } from "./story";
import { ticketText, type TicketParts } from "./ticket";
import { VerdictBody } from "./verdict_detail";

function phaseLabel(name: string): string {
  return name.replaceAll("_", " ");
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

function Recovery({ incident }: { incident: IncidentDocument }): JSX.Element {
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

function Failures({ incident }: { incident: IncidentDocument }): JSX.Element | null {
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

function Costs({ incident }: { incident: IncidentDocument }): JSX.Element {
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

function VerdictBehind({ id }: { id: string }): JSX.Element {
  const found = useResource<VerdictDocument>(`verdicts/${encodeURIComponent(id)}`, {}, "incidents");
  return (
    <Section title="Verdict" tools={<a href={hrefOf(["incidents", "verdicts", id])}>{id}</a>}>
      <Loaded resource={found}>{(verdict) => <VerdictBody verdict={verdict} />}</Loaded>
    </Section>
  );
}

/** The actions that apply now, a row of buttons for each host; a user who may not act sees the reason once. */
function Actions({ story }: { story: StoryDocument }): JSX.Element | null {
  const targets = [...new Set(story.actions.map((one) => one.target))];
  if (targets.length === 0) {
    return null;
  }
  return (
    <span class="row incident-actions">
      {targets.map((target, index) => (
        <span key={target} class="row">
          {target === "" || job.value?.can_act !== true ? null : <span class="faint">{target}</span>}
          <ActionBar
            kinds={story.actions.filter((one) => one.target === target).map((one) => one.kind)}
            target={target}
            isQuiet={index > 0}
          />
        </span>
      ))}
    </span>
  );
}

function WhatToDo({ incident, names }: { incident: IncidentDocument; names: readonly string[] }): JSX.Element {
  const [first, ...others] = names;
  const found = useResource<RunbookDocument>(
    first === undefined ? null : `runbooks/${encodeURIComponent(first)}`, { incident: incident.incident_id }, "incidents",
  );
  if (first === undefined) {
    return (
      <Section title="What to do">
        <p class="soft">Nothing: this was requested by a user.</p>
      </Section>
    );
  }
  return (
    <Section
      title="What to do"
      note={
        <a href={runbookHref(first, incident.incident_id)}>
          {found.data === null ? first : `runbook: ${found.data.title}`}
        </a>
      }
      tools={others.map((name) => (
        <a key={name} href={runbookHref(name, incident.incident_id)}>
          {name.replace(".md", "").replaceAll("-", " ")}
        </a>
      ))}
    >
      <Loaded resource={found} lines={4}>
        {(runbook) => <RunbookSteps runbook={runbook} open={null} />}
      </Loaded>
    </Section>
  );
}

function Happened({ incident, story, audit }: { incident: IncidentDocument; story: Resource<StoryDocument>; audit: AuditDocument | null }): JSX.Element {
  return (
    <Section
      title="What happened"
      note={daysText(incident.began_unix_s, incident.began_unix_s + (incident.down_s ?? 0), clock.value)}
      tools={<a href={hrefOf("audit")}>audit</a>}
    >
      <div class="stack tight">
        <Loaded resource={story} lines={6}>
          {(document) => <InOrder list={storyInOrder(document, auditOf(incident, audit))} since={incident.began_unix_s} />}
        </Loaded>
        <Recovery incident={incident} />
      </div>
    </Section>
  );
}

function Notifications({ story, since }: { story: Resource<StoryDocument>; since: number }): JSX.Element {
  return (
    <Section title="Notifications">
      <Loaded resource={story} lines={2}>
        {(document) =>
          document.notifications.length === 0 ? (
            <p class="soft">{sentence(document.why_not_notified)}</p>
          ) : (
            <InOrder list={document.notifications} since={since} />
          )
        }
      </Loaded>
    </Section>
  );
}

/** Notes written about the time of the incident. */
function Notes({ notes }: { notes: readonly NoteDocument[] }): JSX.Element | null {
  return notes.length === 0 ? null : (
    <Section title="Notes" tools={<a href={hrefOf("notes")}>all notes</a>}>
      <ul class="incident-notes">
        {notes.map((one) => (
          <li key={one.note_id}>
            <a href={hrefOf("notes", { note: one.note_id })}>
              {one.step === null ? <TimeText at={one.at_unix_s} /> : `step ${countText(one.step)}`}
            </a>{" "}
            {one.text} <span class="faint">{one.user}</span>
          </li>
        ))}
      </ul>
    </Section>
  );
}

function WhereAndWho({ incident }: { incident: IncidentDocument }): JSX.Element {
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

interface DetailProps {
  incident: IncidentDocument;
  story: Resource<StoryDocument>;
  logs: Resource<IncidentLogsDocument>;
  audit: AuditDocument | null;
  notes: readonly NoteDocument[];
}

function Detail({ incident, story, logs, audit, notes }: DetailProps): JSX.Element {
  return (
    <>
      <p class="incident-lead">
        <span class="lead">{sentence(incident.reason)}</span>
        <span class="soft">
          Action taken: <strong>{incident.action}</strong>
        </span>
      </p>
      <Costs incident={incident} />
      <div class="split war-room">
        <div class="stack">
          <MomentLogs incident={incident} logs={logs} />
          <Happened incident={incident} story={story} audit={audit} />
          <Section title="Evidence" note={incident.confidence === "" ? undefined : `confidence: ${incident.confidence}`}>
            <Lines lines={incident.evidence} none="No evidence is recorded beyond the reason above." />
          </Section>
          <Notes notes={notes} />
          <Notifications story={story} since={incident.began_unix_s} />
        </div>
        <div class="stack">
          {incident.round === 0 ? null : (
            <div class="previews">
              <MomentRanks incident={incident} />
              <MomentHeat incident={incident} />
            </div>
          )}
          {story.data === null ? null : <WhatToDo incident={incident} names={story.data.runbooks} />}
          <WhereAndWho incident={incident} />
          {incident.verdict_id === "" ? null : <VerdictBehind id={incident.verdict_id} />}
        </div>
      </div>
      <Failures incident={incident} />
    </>
  );
}

export function IncidentDetail({ id }: { id: string }): JSX.Element {
  const path = `incidents/${encodeURIComponent(id)}`;
  const found = useResource<IncidentDocument>(path, {}, "incidents");
  const story = useResource<StoryDocument>(`${path}/story`, {}, "incidents");
  const logs = useResource<IncidentLogsDocument>(`${path}/logs`, {}, found.data?.state === "open" ? "logs" : "incidents");
  const audit = useResource<AuditDocument>("audit", {}, "incidents");
  const allNotes = useResource<NotesDocument>("notes", {}, "incidents");
  const notes = (allNotes.data?.notes ?? []).filter((one) => one.retracted_unix_s === null && one.incident_ids.includes(id));
  const parts = (incident: IncidentDocument): TicketParts => ({
    incident, notes, story: story.data, logs: logs.data, audit: auditOf(incident, audit.data),
    job: job.value?.job ?? "", run: job.value?.run_directory ?? "",
  });
  const incident = found.data;
  return (
    <>
      <p class="crumbs">
        <a href={hrefOf("incidents")}>Incidents</a> / {id}
      </p>
      <ViewHead
        title={sentence(incident?.kind_text ?? `incident ${id}`)}
        note={
          incident === null ? undefined : (
            <span class="row">
              <StateBadge state={incident.state} />
              <TimeText at={incident.began_unix_s} />
            </span>
          )
        }
      >
        {story.data === null ? null : <Actions story={story.data} />}
        {incident === null ? null : <CopyButton text={() => ticketText(parts(incident))}>Copy for ticket</CopyButton>}
      </ViewHead>
      <Loaded resource={found}>{(one) => <Detail incident={one} story={story} logs={logs} audit={audit.data} notes={notes} />}</Loaded>
    </>
  );
}
