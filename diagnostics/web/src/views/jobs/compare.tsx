// Runs side by side: where they stand, how they went over the same steps, and in which keys their configurations differ.

import "./jobs.css";

import type { ComponentChildren, JSX } from "preact";

import { useResource } from "../../api/resource";
import type { CompareDocument, ComparedRun } from "../../api/documents";
import { setParams, useNumberParam, useParam } from "../../app/location";
import { pageOf } from "../../app/place";
import { TableBox } from "../../ui/blocks";
import { CopyButton, Switch } from "../../ui/controls";
import { countOf, countText, durationText, largeText, numberText, percentText, sentence } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Lines, LineKey } from "./lines";

const POINTS = 400;

interface Measure {
  label: string;
  /** How the figure is made: below the label. */
  note?: string;
  value: (run: ComparedRun) => number | null;
  text: (value: number | null) => string;
  /** Beside each run but the first: how far it is from that one. */
  isCompared?: boolean;
}

function measures(told: CompareDocument): readonly Measure[] {
  return [
    {
      label: told.common_step === null ? "Loss" : `Loss up to step ${countText(told.common_step)}`,
      note: "median of the newest 20 steps that all have done",
      value: (run) => run.common_loss,
      text: (value) => numberText(value, 4),
      isCompared: true,
    },
    { label: "Step time", note: "median of the steps shown", value: (run) => run.median_step_s, text: durationText, isCompared: true },
    { label: "Tokens per s", note: "median of the steps shown", value: (run) => run.median_tokens_per_s, text: largeText, isCompared: true },
    { label: "MFU", note: "median of the steps shown", value: (run) => run.median_mfu, text: percentText, isCompared: true },
    { label: "Last step", value: (run) => run.last_step, text: countText },
    { label: "Ranks", value: (run) => run.num_ranks, text: countText },
    { label: "Incidents", value: (run) => run.num_incidents, text: countText },
    { label: "Training time", note: "in steps that count", value: (run) => run.training_s, text: durationText },
    { label: "Training time of all time", note: "MegaScale sec. 6.3", value: (run) => run.effective_time_ratio, text: percentText },
  ];
}

function Difference({ value, first }: { value: number | null; first: number | null }): JSX.Element | null {
  if (value === null || first === null || first === 0) {
    return null;
  }
  const part = value / first - 1;
  const text = Math.abs(part) < 5e-4 ? "same" : `${part > 0 ? "+" : "\u2212"}${percentText(Math.abs(part))}`;
  return <span class="faint compare-difference">{text}</span>;
}

function RunHeads({ told }: { told: CompareDocument }): JSX.Element {
  return (
    <>
      {told.runs.map((run, index) => (
        <th key={run.name} scope="col" class="number">
          <LineKey index={index} /> <a href={pageOf(run.name)}>{run.name}</a>
        </th>
      ))}
    </>
  );
}

function Summary({ told }: { told: CompareDocument }): JSX.Element {
  return (
    <Section title="In short" note="percentages: against the first">
      <TableBox>
        <table class="compare">
          <caption class="visually-hidden">Measures by run</caption>
          <thead>
            <tr>
              <td />
              <RunHeads told={told} />
            </tr>
          </thead>
          <tbody>
            {measures(told).map((measure) => (
              <tr key={measure.label} data-measure={measure.label}>
                <th scope="row">
                  {measure.label}
                  {measure.note === undefined ? null : <span class="line faint compare-note">{measure.note}</span>}
                </th>
                {told.runs.map((run, index) => (
                  <td key={run.name} class="number" data-column={run.name}>
                    {measure.text(measure.value(run))}
                    {index > 0 && measure.isCompared === true && told.runs[0] !== undefined ? (
                      <Difference value={measure.value(run)} first={measure.value(told.runs[0])} />
                    ) : null}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </TableBox>
    </Section>
  );
}

function Configurations({ told }: { told: CompareDocument }): JSX.Element {
  return (
    <Section title="Configuration" note={told.num_same === 0 ? undefined : `${countOf(told.num_same, "other key")} are the same, defaults too`}>
      {told.differences.length === 0 ? (
        <EmptyState title={told.num_same > 0 ? "No key differs" : "Nothing to compare"}>
          {told.num_same > 0 ? "Both were launched with the same configuration." : "The configuration of fewer than two of them is known."}
        </EmptyState>
      ) : (
        <TableBox>
          <table class="compare">
            <caption class="visually-hidden">Keys that differ</caption>
            <thead>
              <tr>
                <th scope="col">Key</th>
                <RunHeads told={told} />
              </tr>
            </thead>
            <tbody>
              {told.differences.map((one) => (
                <tr key={one.key}>
                  <th scope="row">
                    <code>{one.key}</code>
                  </th>
                  {one.values.map((value, index) => (
                    <td key={told.runs[index]?.name} class="number" data-column={told.runs[index]?.name}>
                      {value === null ? <span class="faint">not known</span> : <code>{value}</code>}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </TableBox>
      )}
    </Section>
  );
}

const zoom = (begin: number | null, end: number | null): void => setParams({ begin, end }, { isNewEntry: true });

function Charts({ told }: { told: CompareDocument }): JSX.Element {
  const [scale, setScale] = useParam("loss", "linear");
  const isLog = scale === "log";
  const shared = { steps: told.step, names: told.runs.map((run) => run.name), onZoom: zoom };
  const hasMfu = told.runs.some((run) => run.median_mfu !== null);
  const log: ComponentChildren = <Switch label="log" isOn={isLog} onChange={(isOn) => setScale(isOn ? "log" : "linear")} />;
  return (
    <div class="charts">
      <Lines {...shared} title="Loss" tools={log} values={told.runs.map((run) => run.loss)} text={(value) => numberText(value, 4)} isLog={isLog} />
      <Lines {...shared} title="Step time" values={told.runs.map((run) => run.step_s)} text={durationText} fromZero />
      <Lines {...shared} title="Tokens per s" values={told.runs.map((run) => run.tokens_per_s)} text={largeText} fromZero />
      {hasMfu ? <Lines {...shared} title="MFU" values={told.runs.map((run) => run.mfu)} text={percentText} fromZero /> : null}
    </div>
  );
}

function Notes({ told, isZoomed }: { told: CompareDocument; isZoomed: boolean }): JSX.Element {
  const sampled = told.runs.filter((run) => run.is_sampled).map((run) => run.name);
  return (
    <>
      {isZoomed ? (
        <p class="zoom-line">
          <span class="faint">
            Steps {countText(told.step[0])} to {countText(told.step[told.step.length - 1])} are shown.
          </span>{" "}
          <button type="button" class="button small" onClick={() => zoom(null, null)}>
            Show all
          </button>
        </p>
      ) : null}
      {told.runs.flatMap((run) =>
        run.problems.map((problem) => (
          <p key={`${run.name} ${problem}`} class="stale-line">
            {run.name}: {sentence(problem)}
          </p>
        )),
      )}
      {told.stride > 1 || sampled.length > 0 ? (
        <p class="faint">
          {told.stride > 1 ? `A point is the median of ${countText(told.stride)} steps; drag to look closer. ` : ""}
          {sampled.length > 0 ? `Of ${sampled.join(" and ")} evenly spread steps were read, not all.` : ""}
        </p>
      ) : null}
    </>
  );
}

export function CompareView({ names }: { names: string }): JSX.Element {
  const [begin] = useNumberParam("begin");
  const [end] = useNumberParam("end");
  const found = useResource<CompareDocument>("compare", { jobs: names, first: begin, last: end, points: POINTS }, "jobs");
  return (
    <>
      <ViewHead
        title="Compare runs"
        note={names.split(",").map((name, index) => (
          <span key={name} class="compare-name">
            <LineKey index={index} /> {name}
          </span>
        ))}
      >
        <CopyButton text={() => window.location.href}>Copy link</CopyButton>
        <button type="button" class="button small" onClick={() => setParams({ compare: null, begin: null, end: null }, { isNewEntry: true })}>
          All jobs
        </button>
      </ViewHead>
      <Loaded resource={found} lines={12}>
        {(told) => (
          <>
            <Notes told={told} isZoomed={begin !== null || end !== null} />
            <Charts told={told} />
            <div class="columns">
              <Summary told={told} />
              <Configurations told={told} />
            </div>
          </>
        )}
      </Loaded>
    </>
  );
}
