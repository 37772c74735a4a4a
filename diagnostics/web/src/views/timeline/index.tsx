// The timeline: the operations of ranks in a step, slice by slice, and the ideal without stragglers.

import "./timeline.css";

import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

import { apiUrl } from "../../api/client";
import type { TimelineStepsDocument } from "../../api/documents";
import { useResource } from "../../api/resource";
import { job, shownRound } from "../../app/job";
import { rangeQuery } from "../../app/range";
import { RoundSelect } from "../../app/round_select";
import { hrefOf, setParams } from "../../app/location";
import { idealPicture, timelinePicture, type IdealPicture, type TimelinePicture } from "../../canvas/timeline-picture";
import { findSlices, inOrderOfTime, parseSearch } from "../../canvas/timeline-search";
import { CopyButton, DownloadButton, Select, Switch, TextField } from "../../ui/controls";
import { countOf, countText, durationText, timesText } from "../../ui/format";
import { ViewHead } from "../../ui/section";
import { EmptyState, ErrorState, Skeleton } from "../../ui/states";
import { Chart } from "./chart";
import { Details, sliceText } from "./details";
import { Legend } from "./legend";
import { openInPerfetto } from "./perfetto";
import { slicesQuery, useTimelineChoice, type TimelineChoice } from "./query";
import { useArrays } from "./slices";

const NO_PERFETTO = "No Perfetto is configured for this dashboard ([dashboard] perfetto_url). Download the trace and open it in Perfetto.";

function Handover({ choice }: { choice: TimelineChoice }): JSX.Element {
  const [message, setMessage] = useState("");
  const traceUrl = apiUrl("timeline/trace.json.gz", slicesQuery(choice));
  const perfettoUrl = job.value?.perfetto_url ?? "";
  const open = async (): Promise<void> => {
    if (perfettoUrl === "") {
      setMessage(NO_PERFETTO);
      return;
    }
    setMessage("Sending the trace to Perfetto\u2026");
    try {
      await openInPerfetto(perfettoUrl, traceUrl, `${job.value?.job ?? "megatrain"} steps ${choice.first ?? "newest"}`);
      setMessage("");
    } catch (error) {
      setMessage(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <>
      {message === "" ? null : (
        <span class="section-note" role="status">
          {message}
        </span>
      )}
      <button type="button" class="button small" onClick={() => void open()}>
        Open in Perfetto
      </button>
      <DownloadButton url={traceUrl}>Trace</DownloadButton>
      <CopyButton text={() => window.location.href}>Copy link</CopyButton>
    </>
  );
}

interface StepsProps {
  steps: TimelineStepsDocument | null;
  shown: number | null;
}

/** Selects the step; only fully recorded steps can be drawn. */
function StepChoice({ steps, shown }: StepsProps): JSX.Element {
  const known = steps?.steps ?? [];
  const options = [...known].reverse().map((one) => ({
    value: String(one.step),
    label: `${one.step}  (${durationText(one.duration_s)}, ${countOf(one.num_ranks, "rank")})`,
  }));
  const place = known.findIndex((one) => one.step === shown);
  const go = (step: number | undefined): void => {
    if (step !== undefined) {
      setParams({ first: step, last: step, t0: null, t1: null, slice: null }, { isNewEntry: true });
    }
  };
  return (
    <>
      <Select label="step" options={options} value={shown === null ? "" : String(shown)} onChange={(value) => go(Number(value))} />
      <button type="button" class="button small" disabled={place <= 0} onClick={() => go(known[place - 1]?.step)}>
        Earlier
      </button>
      <button
        type="button"
        class="button small"
        disabled={place < 0 || place >= known.length - 1}
        onClick={() => go(known[place + 1]?.step)}
      >
        Later
      </button>
    </>
  );
}

interface SearchProps {
  picture: TimelinePicture;
  search: string;
  matches: Int32Array;
  cursor: number;
  setCursor: (slice: number) => void;
}

function SearchLine({ picture, search, matches, cursor, setCursor }: SearchProps): JSX.Element {
  const place = matches.indexOf(cursor);
  const go = (by: number): void => {
    if (matches.length > 0) {
      const now = picture.begin[cursor] ?? 0;
      const next = place >= 0 ? place + by : matches.findIndex((slice) => (picture.begin[slice] ?? 0) >= now);
      setCursor(matches[(next + matches.length) % matches.length] ?? -1);
    }
  };
  return (
    <>
      <TextField
        label="find"
        value={search}
        onChange={(value) => setParams({ find: value })}
        placeholder="backward rank:3 mb:2"
        isSearch
        size={22}
      />
      {search === "" ? null : (
        <>
          <button type="button" class="button small" disabled={matches.length === 0} onClick={() => go(-1)}>
            Previous
          </button>
          <button type="button" class="button small" disabled={matches.length === 0} onClick={() => go(1)}>
            Next
          </button>
          <span class="section-note" role="status" data-testid="timeline-matches">
            {matches.length === 0 ? "no match" : `${place >= 0 ? `${countText(place + 1)} of ` : ""}${countText(matches.length)}`}
          </span>
        </>
      )}
    </>
  );
}

function IdealNote({ ideal, isPending }: { ideal: IdealPicture | null; isPending: boolean }): JSX.Element | null {
  if (ideal === null) {
    return isPending ? <span class="section-note">replaying the step{"\u2026"}</span> : null;
  }
  if (ideal.idealS === null) {
    return <span class="section-note tone-warning">Ideal not available: {ideal.problem}</span>;
  }
  const replayed = ideal.replayedS.length === 0 ? null : ideal.replayedS.reduce((sum, one) => sum + one, 0) / ideal.replayedS.length;
  return (
    <span class="section-note" title="the step replayed as measured, compared with all operations at their ideal time; the ratio is S">
      replayed {durationText(replayed)}, without stragglers {durationText(ideal.idealS)}
      {replayed === null ? "" : `: ${timesText(replayed / ideal.idealS)} the time`}
    </span>
  );
}

interface ShownProps {
  picture: TimelinePicture;
  choice: TimelineChoice;
  steps: TimelineStepsDocument | null;
}

function Shown({ picture, choice, steps }: ShownProps): JSX.Element {
  const [cursor, setCursor] = useState(-1);
  const [hovered, setHovered] = useState(-1);
  useEffect(() => setCursor(-1), [picture]);
  const wantsIdeal = choice.hasIdeal || choice.hasCritical;
  const named = { ...slicesQuery(choice), first: picture.firstStep, last: picture.lastStep };
  const ideal = useArrays("timeline/ideal", named, idealPicture, wantsIdeal);
  const search = useMemo(() => parseSearch(choice.search), [choice.search]);
  const found = useMemo(() => (search === null ? null : findSlices(picture, search)), [picture, search]);
  const matches = useMemo(() => (found === null ? new Int32Array(0) : inOrderOfTime(picture, found)), [picture, found]);
  const seen = hovered >= 0 ? hovered : cursor;
  const all = countText(picture.numSlices);
  return (
    <>
      <div class="picture-controls" role="group" aria-label="Display options">
        <StepChoice steps={steps} shown={picture.firstStep} />
        <TextField label="ranks" value={choice.ranks} onChange={(value) => setParams({ ranks: value })} placeholder="0:7,16" size={12} />
        <SearchLine picture={picture} search={choice.search} matches={matches} cursor={cursor} setCursor={setCursor} />
        <Switch label="arrows" isOn={choice.hasFlows} onChange={(isOn) => setParams({ flows: isOn ? null : 0 })} title="arrows from send to receive" />
        <Switch label="ideal" isOn={choice.hasIdeal} onChange={(isOn) => setParams({ ideal: isOn ? 1 : null })} title="show below each line where its slices would be without stragglers" />
        <Switch label="critical path" isOn={choice.hasCritical} onChange={(isOn) => setParams({ critical: isOn ? 1 : null })} title="outline the slices that determined the length of the step" />
        {wantsIdeal ? <IdealNote ideal={ideal.data} isPending={ideal.isPending} /> : null}
      </div>
      <Legend picture={picture} />
      <Chart
        key={`${picture.round} ${picture.firstStep} ${picture.lastStep} ${choice.ranks}`}
        picture={picture}
        ideal={ideal.data}
        hasIdeal={choice.hasIdeal}
        hasCritical={choice.hasCritical}
        hasFlows={choice.hasFlows}
        found={found}
        cursor={cursor}
        setCursor={setCursor}
        setHovered={setHovered}
        fromNs={choice.fromNs}
        toNs={choice.toNs}
        rank={choice.rank}
      />
      <Details picture={picture} ideal={ideal.data} slice={seen} />
      <p class="visually-hidden" role="status" aria-live="polite">
        {cursor < 0 ? "" : sliceText(picture, cursor)}
      </p>
      {[...picture.leftOut, ...picture.notes].map((text) => (
        <p key={text} class="section-note">
          {text}
        </p>
      ))}
      <p class="section-note">
        {all} slices of {countOf(picture.rank.length, "rank")}, {countText(picture.flows.length / 2)} arrows
      </p>
    </>
  );
}

function nearest(steps: TimelineStepsDocument | null, step: number): number | null {
  let best: number | null = null;
  for (const one of steps?.steps ?? []) {
    if (best === null || Math.abs(one.step - step) < Math.abs(best - step)) {
      best = one.step;
    }
  }
  return best;
}

export function TimelineView(): JSX.Element {
  const choice = useTimelineChoice();
  const number = shownRound.value?.number;
  const steps = useResource<TimelineStepsDocument>("timeline/steps", { round: number, ...rangeQuery() }, "timeline");
  const slices = useArrays("timeline", slicesQuery(choice), timelinePicture, true);
  const { data: picture, error } = slices;
  const asked = choice.first ?? choice.last;
  const other = asked === null ? null : nearest(steps.data, asked);
  const isMissing = error !== null && error.status === 404;
  return (
    <>
      <ViewHead title="Timeline" note={picture === null ? "" : `round ${picture.round}`}>
        <RoundSelect />
        {picture === null ? null : <Handover choice={choice} />}
      </ViewHead>
      {picture !== null ? <Shown picture={picture} choice={choice} steps={steps.data} /> : null}
      {isMissing ? (
        <EmptyState
          title={asked === null ? "No fully recorded steps" : `Step ${asked} was not recorded in full`}
          action={
            other === null ? (
              <code>megatrain diag set --help</code>
            ) : (
              <a href={hrefOf("timeline", { rank: choice.rank, first: other, last: other })}>Show step {other} instead</a>
            )
          }
        >
          {asked === null || other === null
            ? error.message
            : "One step in diagnostics.sample_period is recorded in full. The heat map shows the totals of the other steps."}
        </EmptyState>
      ) : null}
      {error !== null && !isMissing ? <ErrorState error={error} onRetry={slices.reload} /> : null}
      {error !== null && choice.ranks !== "" ? (
        <button type="button" class="button" onClick={() => setParams({ ranks: null })}>
          Show the default ranks
        </button>
      ) : null}
      {picture === null && error === null ? <Skeleton lines={14} /> : null}
    </>
  );
}
