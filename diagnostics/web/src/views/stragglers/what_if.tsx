// The slowdown of a step compared with one in which all similar operations take their typical time, broken down by source; and
// the gain of each possible action over the rest of the job, with its cost.

import type { JSX } from "preact";

import type { Resource } from "../../api/resource";
import type { ActionBalance, PartDocument, WhatIfDocument } from "../../api/documents";
import { hrefOf, useParam } from "../../app/location";
import { Badge } from "../../ui/badge";
import { Bars, Sparkline } from "../../ui/bars";
import { Segmented } from "../../ui/controls";
import { Duration, Figure } from "../../ui/figures";
import { countOf, countText, durationText, percentText, ranksText, timesText } from "../../ui/format";
import { Section } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";

const MOST_PARTS = 16;

const BY = [
  { value: "operation", label: "operation" },
  { value: "stage", label: "stage" },
  { value: "dp", label: "dp rank" },
  { value: "cause", label: "cause" },
];

function partsBy(document: WhatIfDocument, by: string): readonly PartDocument[] {
  switch (by) {
    case "stage":
      return document.by_stage;
    case "dp":
      return document.by_dp_rank;
    case "cause":
      return document.by_cause;
    default:
      return document.by_operation;
  }
}

function WhereFrom({ document }: { document: WhatIfDocument }): JSX.Element {
  const [by, setBy] = useParam("by", "operation");
  const prefix = by === "stage" ? "stage " : by === "dp" ? "dp " : "";
  const parts = [...partsBy(document, by)].sort((a, b) => b.slowdown - a.slowdown).slice(0, MOST_PARTS);
  return (
    <Section
      title="Sources of the slowdown"
      note="how much longer a step takes because of each source alone, if all else were typical"
      tools={<Segmented label="Parts" options={BY} value={by} onChange={setBy} />}
    >
      {parts.length === 0 ? (
        <p class="soft">No data of this kind for these steps.</p>
      ) : (
        <Bars
          caption={`Slowdown by ${by}`}
          bars={parts.map((part) => ({ key: part.name, label: `${prefix}${part.name}`, value: part.slowdown, text: longerText(part.slowdown) }))}
          from={1}
          atLeast={0.01}
        />
      )}
    </Section>
  );
}

const ACTION_COLUMNS: readonly Column<ActionBalance>[] = [
  {
    key: "action",
    label: "Action",
    className: "wide",
    render: (row) => (
      <>
        <strong>{row.action}</strong> {row.target}
        <span class="line soft">{row.text}</span>
      </>
    ),
  },
  {
    key: "step",
    label: "Gain per step",
    isNumber: true,
    sort: (row) => row.gain_s_per_step,
    render: (row) => <Duration seconds={row.gain_s_per_step} />,
  },
  { key: "gain", label: "Total gain", isNumber: true, sort: (row) => row.gain_s, render: (row) => <Duration seconds={row.gain_s} /> },
  { key: "cost", label: "Cost", isNumber: true, sort: (row) => row.cost_s, render: (row) => <Duration seconds={row.cost_s} /> },
  {
    key: "worth",
    label: "Worth the cost",
    render: (row) =>
      row.is_worth_it === null ? (
        <span class="faint">{row.cost_s === 0 ? "" : "unknown"}</span>
      ) : (
        <Badge tone={row.is_worth_it ? "good" : "quiet"} shape={row.is_worth_it ? "circle" : "ring"}>
          {row.is_worth_it ? "yes" : "no"}
        </Badge>
      ),
  },
];

/** Return a slowdown as text: 1.083 -> "8.3 % longer". */
function longerText(slowdown: number): string {
  return slowdown <= 1.0005 ? "not longer" : `${percentText(slowdown - 1)} longer`;
}

function Totals({ document }: { document: WhatIfDocument }): JSX.Element {
  const rank = document.worst_ranks[0];
  const round = document.round;
  return (
    <dl class="figures four">
      <Figure
        label="Longer than typical"
        value={percentText(Math.max(0, document.slowdown - 1))}
        note={`replayed step ${durationText(document.replayed_s)}, typical step ${durationText(document.ideal_s)}`}
        title={`S = ${timesText(document.slowdown)}: a step replayed with measured operations, divided by one replayed with typical operations; pauses between operations are excluded from both`}
      />
      <Figure
        label="Lost to stragglers"
        value={percentText(document.waste)}
        note="of the step time"
        title="1 - 1/S: the share of a step in which ranks wait for slower ones"
      />
      <Figure label="Measured step" value={durationText(document.measured_s)} note="including pauses" />
      <Figure
        label="By slowest ranks"
        value={percentText(Math.max(0, document.m_w))}
        note={rank === undefined ? "" : <a href={hrefOf("ranks", { rank, round })}>of the lost time: {document.worst_ranks.length === 1 ? "rank" : "ranks"} {ranksText(document.worst_ranks, 4)}</a>}
        title="M_W: the share of the lost time that would be regained if the slowest 3 % of the ranks were typical"
      />
      {document.by_stage.length > 1 && (
        <Figure
          label="By the last stage"
          value={percentText(Math.max(0, document.m_s))}
          note="of the lost time"
          title="M_S: the share of the lost time that would be regained if the last pipeline stage were typical"
        />
      )}
      <Figure
        label="By kernel launches"
        value={percentText(Math.max(0, document.launch_slowdown - 1))}
        note="longer because kernels start late"
        title="how much longer a step takes because operations start later than their dependencies end"
      />
      <Figure
        label="By step"
        value={<Sparkline values={document.slowdown_by_step} label="Slowdown by step" />}
        note={
          <a href={hrefOf("timeline", { first: document.steps[0], last: document.steps[0], round })}>
            {countOf(document.steps.length, "full step")}, from {countText(document.steps[0])}
          </a>
        }
      />
    </dl>
  );
}

function Found({ document }: { document: WhatIfDocument }): JSX.Element {
  return (
    <>
      <Totals document={document} />
      {document.advice === "" ? null : <p class="lead reading">{document.advice}</p>}
      <WhereFrom document={document} />
      <Section title="Possible actions" note="gain over the rest of the job, compared with the cost">
        <Table
          caption="Possible actions"
          columns={ACTION_COLUMNS}
          rows={document.actions}
          rowKey={(row) => `${row.action} ${row.target}`}
          sortParam="ways"
        />
      </Section>
      {document.notes.length === 0 ? null : (
        <ul class="notes">
          {document.notes.map((note) => (
            <li key={note}>{note}</li>
          ))}
        </ul>
      )}
    </>
  );
}

export function WhatIf({ resource }: { resource: Resource<WhatIfDocument> }): JSX.Element {
  return (
    <div class="stack">
      <Section title="Slowdown by stragglers (what-if)">
        <Loaded resource={resource} none="No fully recorded steps">
          {(document) => (
            <div class="stack">
              <Found document={document} />
            </div>
          )}
        </Loaded>
      </Section>
    </div>
  );
}
