// The page of one incident: events, logs, ranks, heat map, runbook and notifications, and a text for a ticket.

import "./incidents.css";

import type { JSX } from "preact";

import { useResource, type Resource } from "../../api/resource";
import type {
  AuditDocument, IncidentDocument, IncidentLogsDocument, NoteDocument, NotesDocument, RunbookDocument, StoryDocument, VerdictDocument,
} from "../../api/documents";
import { job } from "../../app/job";
import { hrefOf } from "../../app/location";
import { clock } from "../../app/preferences";
import { CopyButton } from "../../ui/controls";
import { TimeText } from "../../ui/figures";
import { countText, daysText, sentence } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { ActionBar } from "../actions/action_bar";
import { RunbookSteps, runbookHref } from "../runbooks/steps";
import { Costs, Failures, Recovery, WhereAndWho } from "./incident_facts";
import { MomentLogs } from "./moment_logs";
import { MomentRanks, MomentHeat } from "./moment_pictures";
import { Lines, StateBadge } from "./parts";
import { auditOf, InOrder, storyInOrder } from "./story";
import { ticketText, type TicketParts } from "./ticket";
import { VerdictBody } from "./verdict_detail";

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
