// Checkpoints: the resume point, which are complete, which are pinned, and their branches.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { BranchDocument, CheckpointDocument, CheckpointsDocument } from "../../api/documents";
import { job } from "../../app/job";
import { rangeQuery } from "../../app/range";
import { useParam } from "../../app/location";
import { Badge, type Tone } from "../../ui/badge";
import { Switch } from "../../ui/controls";
import { Age, Bytes, TimeText } from "../../ui/figures";
import { countOf, countText, largeText, sentence } from "../../ui/format";
import type { Shape } from "../../ui/icons";
import { Section, ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { ActionBar } from "../actions/action_bar";

const STATES: Record<string, { tone: Tone; shape: Shape }> = {
  committed: { tone: "good", shape: "circle" },
  pinned: { tone: "good", shape: "diamond" },
  unfinished: { tone: "warning", shape: "dashes" },
  damaged: { tone: "bad", shape: "octagon" },
};

function State({ row }: { row: CheckpointDocument }): JSX.Element {
  const known = STATES[row.state] ?? { tone: "quiet" as const, shape: "ring" as const };
  return (
    <Badge tone={known.tone} shape={known.shape} title={row.pin_reason}>
      {row.state}
    </Badge>
  );
}

function Verified({ row }: { row: CheckpointDocument }): JSX.Element {
  if (row.verify_result === "") {
    return <span class="faint">never</span>;
  }
  const isWhole = row.verify_result === "whole";
  return (
    <Badge tone={isWhole ? "good" : "bad"} shape={isWhole ? "circle" : "octagon"} title={row.verify_result}>
      {isWhole ? "intact" : "damaged"}, <Age at={row.verified_unix_s} />
    </Badge>
  );
}

const COLUMNS: readonly Column<CheckpointDocument>[] = [
  {
    key: "step",
    label: "Step",
    isNumber: true,
    sort: (row) => row.step,
    render: (row) => <strong>{countText(row.step)}</strong>,
  },
  {
    key: "role",
    label: "Resume",
    render: (row) =>
      row.is_resume_point ? (
        <Badge tone="accent" shape="triangle" title="A restart resumes from this checkpoint">
          from here
        </Badge>
      ) : row.is_in_line ? (
        <span class="faint" title="On the path to the current branch">current history</span>
      ) : (
        <span class="faint" title="Abandoned when the job was restored to an older step">
          abandoned
        </span>
      ),
  },
  { key: "branch", label: "Branch", sort: (row) => row.branch, render: (row) => row.branch },
  { key: "state", label: "State", sort: (row) => row.state, render: (row) => <State row={row} /> },
  {
    key: "age",
    label: "Written",
    isNumber: true,
    sort: (row) => row.written_unix_s,
    render: (row) => (
      <>
        <TimeText at={row.written_unix_s} />
        <span class="line faint">
          <Age at={row.written_unix_s} />
        </span>
      </>
    ),
  },
  { key: "size", label: "Size", isNumber: true, sort: (row) => row.num_bytes, render: (row) => <Bytes value={row.num_bytes} /> },
  {
    key: "tokens",
    label: "Tokens",
    isNumber: true,
    sort: (row) => row.consumed_tokens,
    render: (row) => largeText(row.consumed_tokens),
  },
  { key: "round", label: "Round", isNumber: true, sort: (row) => row.round, render: (row) => countText(row.round) },
  { key: "verified", label: "Verified", render: (row) => <Verified row={row} /> },
  {
    key: "remark",
    label: "Remark",
    className: "wide",
    render: (row) => (
      <>
        {row.problem === "" ? null : <span class="tone-text-bad">{row.problem} </span>}
        {row.pin_reason === "" ? null : <span class="soft">pinned: {row.pin_reason} </span>}
        {row.verify_result === "" || row.verify_result === "whole" ? null : <span class="soft">{row.verify_result}</span>}
      </>
    ),
  },
];

function Branches({ branches }: { branches: readonly BranchDocument[] }): JSX.Element {
  return (
    <Section title="Branches" note="restoring an older step starts a new branch">
      <ol class="branches">
        {branches.map((branch) => (
          <li key={branch.name} class={branch.is_current ? "is-current" : ""}>
            <Badge tone={branch.is_current ? "accent" : "quiet"} shape={branch.is_current ? "circle" : "ring"}>
              {branch.name}
            </Badge>
            <span class="soft">
              {branch.parent === "" ? "first branch" : `from ${branch.parent} at step ${countText(branch.parent_step)}`}
              {branch.reason === "" ? "" : `: ${branch.reason}`}
            </span>
            <span class="faint">
              <TimeText at={branch.created_unix_s} />
            </span>
          </li>
        ))}
      </ol>
    </Section>
  );
}

function Found({ document, hasAll }: { document: CheckpointsDocument; hasAll: boolean }): JSX.Element {
  const shown = hasAll ? document.checkpoints : document.checkpoints.filter((one) => one.is_in_line);
  if (document.checkpoints.length === 0) {
    return (
      <EmptyState
        title="No checkpoint yet"
        action={job.value?.can_act === true ? "Request one with the button above, or lower checkpoint.interval." : undefined}
      >
        There is no checkpoint in {document.place === "" ? "the run directory" : document.place}.
        {job.value?.is_recorded === true ? "" : " If the job failed now, it would restart at step 0."}
      </EmptyState>
    );
  }
  return (
    <>
      {document.resume_reason === "" ? null : <p class="lead reading">{sentence(document.resume_reason)}</p>}
      <Table
        caption="Checkpoints"
        columns={COLUMNS}
        rows={shown}
        rowKey={(row) => `${row.branch} ${row.step} ${row.place}`}
        rowClass={(row) => (row.is_in_line ? "" : "is-faint")}
        isChosen={(row) => row.is_resume_point}
        defaultSort="-age"
      />
      {document.num_elsewhere === 0 ? null : (
        <p class="section-note">Not shown: {countOf(document.num_elsewhere, "checkpoint")} outside of this range.</p>
      )}
      {document.branches.length > 1 ? <Branches branches={document.branches} /> : null}
    </>
  );
}

export function CheckpointsView(): JSX.Element {
  const [all, setAll] = useParam("abandoned", "yes");
  const found = useResource<CheckpointsDocument>("checkpoints", rangeQuery(), "checkpoints");
  return (
    <>
      <ViewHead title="Checkpoints" note={found.data?.place}>
        <Switch label="show abandoned branches" isOn={all === "yes"} onChange={(isOn) => setAll(isOn ? "yes" : "no")} />
        <ActionBar kinds={["checkpoint"]} target="" />
      </ViewHead>
      <Loaded resource={found}>{(document) => <Found document={document} hasAll={all === "yes"} />}</Loaded>
    </>
  );
}
