// S: how much slower the job is than one whose like operations all take their typical time, by what it comes from; and
// what each way out would gain over the rest of the job, set against its price.

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
import { EmptyState, Loaded } from "../../ui/states";
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
  const [by, setBy] = useParam("from", "operation");
  const parts = [...partsBy(document, by)].sort((a, b) => b.slowdown - a.slowdown).slice(0, MOST_PARTS);
  return (
    <Section
      title="Where it comes from"
      note="the job's slowdown, were all but this ideal"
      tools={<Segmented label="Parts" options={BY} value={by} onChange={setBy} />}
    >
      {parts.length === 0 ? (
        <p class="soft">Nothing of this kind is known for these steps.</p>
      ) : (
        <Bars
          caption={`Slowdown by ${by}`}
          bars={parts.map((part) => ({ key: part.name, label: part.name, value: part.slowdown, text: timesText(part.slowdown) }))}
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
    label: "Way out",
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
    label: "Gain a step",
    isNumber: true,
    sort: (row) => row.gain_s_per_step,
    render: (row) => <Duration seconds={row.gain_s_per_step} />,
  },
  { key: "gain", label: "Gain to the end", isNumber: true, sort: (row) => row.gain_s, render: (row) => <Duration seconds={row.gain_s} /> },
  { key: "price", label: "Price", isNumber: true, sort: (row) => row.price_s, render: (row) => <Duration seconds={row.price_s} /> },
  {
    key: "worth",
    label: "Worth it",
    render: (row) =>
      row.is_worth_it === null ? (
        <span class="faint">{row.price_s === 0 ? "" : "not known"}</span>
      ) : (
        <Badge tone={row.is_worth_it ? "good" : "quiet"} shape={row.is_worth_it ? "circle" : "ring"}>
          {row.is_worth_it ? "yes" : "no"}
        </Badge>
      ),
  },
];

function Totals({ document }: { document: WhatIfDocument }): JSX.Element {
  const rank = document.worst_ranks[0];
  return (
    <dl class="figures">
      <Figure
        label="S, slowdown"
        value={timesText(document.slowdown)}
        note={`replayed ${durationText(document.replayed_s)}, ideal ${durationText(document.ideal_s)}`}
        title="S: a step played again with every operation as long as it was, over the same with every operation as long as its like are; pauses between operations are in neither"
      />
      <Figure label="Waste" value={percentText(document.waste)} note="of the time, for stragglers" />
      <Figure label="Measured step" value={durationText(document.measured_s)} note="with the pauses" />
      <Figure
        label="By the worst ranks"
        value={percentText(Math.max(0, document.m_w))}
        note={rank === undefined ? "" : <a href={hrefOf("grid", { rank })}>ranks {ranksText(document.worst_ranks, 4)}</a>}
        title="M_W: the part of the slowdown that goes away with the worst 3 % of the ranks"
      />
      <Figure
        label="By the last stage"
        value={percentText(Math.max(0, document.m_s))}
        note="M_S"
        title="M_S: the part of the slowdown that goes away with the last stage"
      />
      <Figure label="Launching" value={timesText(Math.max(1, document.launch_slowdown))} note="by the host, not the device" />
      <Figure
        label="Steps"
        value={<Sparkline values={document.slowdown_by_step} label="Slowdown by step" />}
        note={
          <a href={hrefOf("timeline", { first: document.steps[0], last: document.steps[0] })}>
            {countOf(document.steps.length, "step")} in full, from {countText(document.steps[0])}
          </a>
        }
      />
    </dl>
  );
}

function Found({ document }: { document: WhatIfDocument }): JSX.Element {
  if (document.steps.length === 0) {
    return (
      <EmptyState
        title="No step is recorded in full"
        action={
          <>
            Ask for them: <code>megatrain diag on</code>
          </>
        }
      >
        What-if needs every span of a step. One step in diagnostics.sample_period is recorded so; the first has not come yet.
      </EmptyState>
    );
  }
  return (
    <>
      <Totals document={document} />
      {document.advice === "" ? null : <p class="lead reading">{document.advice}</p>}
      <WhereFrom document={document} />
      <Section title="Ways out" note="gain over the rest of the job against the price">
        {document.actions.length === 0 ? (
          <p class="soft">Nothing is known that would make the job faster.</p>
        ) : (
          <Table
            caption="Ways out"
            columns={ACTION_COLUMNS}
            rows={document.actions}
            rowKey={(row) => `${row.action} ${row.target}`}
            sortParam="ways"
          />
        )}
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
      <Section title="What if all were typical?">
        <Loaded resource={resource} none="No step is recorded in full">
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
