// All incidents, newest first, and the verdicts of the diagnosis with their outcomes.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";

import { useResource } from "../../api/resource";
import type { IncidentDocument, IncidentsDocument, NoteDocument, NotesDocument, VerdictDocument } from "../../api/documents";
import { hrefOf, setParams, useParam } from "../../app/location";
import { isWholeRun, rangeQuery, setRange } from "../../app/range";
import { Select, TextField } from "../../ui/controls";
import { Duration, Fact, Facts, TimeText } from "../../ui/figures";
import { countOf, countText, ranksText } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { HostLinks, OutcomeBadge, StateBadge } from "./parts";

const INCIDENT_COLUMNS: readonly Column<IncidentDocument>[] = [
  { key: "began", label: "Began", sort: (row) => row.began_unix_s, render: (row) => <TimeText at={row.began_unix_s} /> },
  { key: "state", label: "State", sort: (row) => row.state, render: (row) => <StateBadge state={row.state} /> },
  {
    key: "kind",
    label: "Kind",
    sort: (row) => row.kind_text,
    render: (row) => <a href={hrefOf(["incidents", row.incident_id])}>{row.kind_text}</a>,
  },
  { key: "where", label: "Hosts", sort: (row) => row.hosts[0] ?? null, render: (row) => <HostLinks hosts={row.hosts} /> },
  { key: "ranks", label: "Ranks", isNumber: true, sort: (row) => row.ranks[0] ?? null, render: (row) => ranksText(row.ranks, 3) },
  { key: "action", label: "Action taken", sort: (row) => row.action, render: (row) => row.action },
  { key: "reason", label: "Reason", className: "clip", render: (row) => <span title={row.reason}>{row.reason}</span> },
  { key: "down", label: "Downtime", isNumber: true, sort: (row) => row.down_s, render: (row) => <Duration seconds={row.down_s} /> },
  {
    key: "lost",
    label: "Steps lost",
    isNumber: true,
    sort: (row) => row.steps_lost,
    render: (row) => countText(row.steps_lost),
  },
  { key: "round", label: "Round", isNumber: true, sort: (row) => row.round, render: (row) => countText(row.round) },
];

const VERDICT_COLUMNS: readonly Column<VerdictDocument>[] = [
  { key: "at", label: "When", sort: (row) => row.created_unix_s, render: (row) => <TimeText at={row.created_unix_s} /> },
  {
    key: "outcome",
    label: "Outcome",
    sort: (row) => row.outcome,
    render: (row) => <OutcomeBadge outcome={row.outcome} />,
  },
  {
    key: "cause",
    label: "Cause",
    sort: (row) => row.cause,
    render: (row) => <a href={hrefOf(["incidents", "verdicts", row.verdict_id])}>{row.cause === "" ? row.kind : row.cause}</a>,
  },
  { key: "hosts", label: "Hosts", sort: (row) => row.hosts[0] ?? null, render: (row) => <HostLinks hosts={row.hosts} /> },
  { key: "confidence", label: "Confidence", sort: (row) => row.confidence, render: (row) => row.confidence },
  { key: "why", label: "Reason", className: "clip", render: (row) => <span title={row.outcome_reason}>{row.outcome_reason}</span> },
  { key: "gain", label: "Gain", isNumber: true, sort: (row) => row.gain_s, render: (row) => <Duration seconds={row.gain_s} /> },
  {
    key: "cost",
    label: "Cost",
    isNumber: true,
    sort: (row) => row.cost_s,
    render: (row) => <Duration seconds={row.cost_s} />,
  },
];

/** Return the columns, with notes about the time of an incident below its reason. */
function columnsWith(notes: readonly NoteDocument[]): readonly Column<IncidentDocument>[] {
  const texts = new Map<string, string[]>();
  for (const note of notes.filter((one) => one.retracted_unix_s === null)) {
    for (const id of note.incident_ids) {
      texts.set(id, [...(texts.get(id) ?? []), `${note.user}: ${note.text}`]);
    }
  }
  if (texts.size === 0) {
    return INCIDENT_COLUMNS;
  }
  const render = (row: IncidentDocument): JSX.Element => (
    <>
      <span title={row.reason}>{row.reason}</span>
      {(texts.get(row.incident_id) ?? []).map((text) => (
        <span key={text} class="line incident-note" title={text}>
          {text}
        </span>
      ))}
    </>
  );
  return INCIDENT_COLUMNS.map((column) => (column.key === "reason" ? { ...column, label: "Reason, notes", render } : column));
}

function kindsOf(document: IncidentsDocument): { value: string; label: string }[] {
  const texts = new Map(document.incidents.map((one) => [one.kind, one.kind_text]));
  return [{ value: "", label: "all" }, ...Array.from(texts, ([value, label]) => ({ value, label }))];
}

interface Choices {
  kind: string;
  state: string;
  host: string;
}

/** Return the incidents that match the filters; a part of a host's name is enough. */
export function chosenIncidents(all: readonly IncidentDocument[], choices: Choices): readonly IncidentDocument[] {
  return all.filter(
    (one) =>
      (choices.kind === "" || one.kind === choices.kind) &&
      (choices.state === "" || one.state === choices.state) &&
      (choices.host === "" || one.hosts.some((host) => host.includes(choices.host))),
  );
}

const STATES = [
  { value: "", label: "all" },
  { value: "open", label: "open" },
  { value: "recovered", label: "recovered" },
  { value: "stopped", label: "stopped the job" },
  { value: "held", label: "held" },
];

function Lists({ document, choices }: { document: IncidentsDocument; choices: Choices }): JSX.Element {
  const incidents = useMemo(
    () => chosenIncidents(document.incidents, choices),
    [document, choices.kind, choices.state, choices.host],
  );
  const notes = useResource<NotesDocument>("notes", {}, "incidents").data?.notes;
  const columns = useMemo(() => columnsWith(notes ?? []), [notes]);
  return (
    <>
      {document.incidents.length === 0 && !isWholeRun.value ? (
        <EmptyState
          title="No incident in this range"
          action={
            <button type="button" class="button small" onClick={() => setRange("")}>
              Show the whole run
            </button>
          }
        >
          There were no incidents in this time.
        </EmptyState>
      ) : document.incidents.length === 0 ? (
        <EmptyState title="No incident">
          There were no incidents since the job began. Ended workers, hangs, lost hosts and evicted stragglers are listed here,
          with the action taken and the cost.
        </EmptyState>
      ) : incidents.length === 0 ? (
        <EmptyState
          title="No matching incidents"
          action={
            <button type="button" class="button small" onClick={() => setParams({ kind: null, state: null, host: null })}>
              Show all {document.incidents.length}
            </button>
          }
        >
          No incident matches the filters above.
        </EmptyState>
      ) : (
        <Table
          caption="Incidents"
          columns={columns}
          rows={incidents}
          rowKey={(row) => row.incident_id}
          defaultSort="-began"
        />
      )}
      {document.damaged.length === 0 ? null : (
        <Section title="Damaged records" note={`${countOf(document.damaged.length, "incident")} cannot be read`}>
          <Facts>
            {document.damaged.map((one) => (
              <Fact key={one.incident_id} label={one.incident_id}>
                {one.text}
              </Fact>
            ))}
          </Facts>
        </Section>
      )}
      <Section title="Verdicts of the diagnosis" note="findings, and the decisions of the driver">
        {document.verdicts.length === 0 ? (
          <p class="soft">No verdicts{isWholeRun.value ? "" : " in this range"}: the diagnosis has identified no culprit.</p>
        ) : (
          <Table
            caption="Verdicts"
            columns={VERDICT_COLUMNS}
            rows={document.verdicts}
            rowKey={(row) => row.verdict_id}
            sortParam="verdicts"
            defaultSort="-at"
          />
        )}
      </Section>
    </>
  );
}

export function IncidentList(): JSX.Element {
  const [kind, setKind] = useParam("kind", "");
  const [state, setState] = useParam("state", "");
  const [host, setHost] = useParam("host", "");
  const found = useResource<IncidentsDocument>("incidents", rangeQuery(), "incidents");
  return (
    <>
      <ViewHead title="Incidents" note={found.data === null ? undefined : `${countText(found.data.incidents.length)} in all`}>
        <Select
          label="Kind"
          options={found.data === null ? [{ value: "", label: "all" }] : kindsOf(found.data)}
          value={kind}
          onChange={setKind}
        />
        <Select label="State" options={STATES} value={state} onChange={setState} />
        <TextField label="Host" value={host} onChange={setHost} isSearch placeholder="part of a name" size={14} />
      </ViewHead>
      <Loaded resource={found}>{(document) => <Lists document={document} choices={{ kind, state, host }} />}</Loaded>
    </>
  );
}
