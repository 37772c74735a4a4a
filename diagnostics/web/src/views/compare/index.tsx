// A comparison of runs: summary, charts over the same steps, and the keys in which their configurations differ.

import "./compare.css";

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
  /** How the value is computed, shown below the label. */
  note?: string;
  value: (run: ComparedRun) => number | null;
  text: (value: number | null) => string;
  /** Each run but the first also shows its difference from the first. */
  isCompared?: boolean;
}

function measures(comparison: CompareDocument): readonly Measure[] {
  return [
    {
      label: comparison.common_step === null ? "Loss" : `Loss up to step ${countText(comparison.common_step)}`,
      note: "median of the newest 20 steps that all runs have completed",
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
    { label: "Training time / total time", note: "MegaScale sec. 6.3", value: (run) => run.effective_time_ratio, text: percentText },
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

function RunHeads({ comparison }: { comparison: CompareDocument }): JSX.Element {
  return (
    <>
      {comparison.runs.map((run, index) => (
        <th key={run.name} scope="col" class="number">
          <LineKey index={index} /> <a href={pageOf(run.name)}>{run.name}</a>
        </th>
      ))}
    </>
  );
}

function Summary({ comparison }: { comparison: CompareDocument }): JSX.Element {
  return (
    <Section title="Summary" note="percentages: difference from the first run">
      <TableBox>
        <table class="compare">
          <caption class="visually-hidden">Measures by run</caption>
          <thead>
            <tr>
              <td />
              <RunHeads comparison={comparison} />
            </tr>
          </thead>
          <tbody>
            {measures(comparison).map((measure) => (
              <tr key={measure.label} data-measure={measure.label}>
                <th scope="row">
                  {measure.label}
                  {measure.note === undefined ? null : <span class="line faint compare-note">{measure.note}</span>}
                </th>
                {comparison.runs.map((run, index) => (
                  <td key={run.name} class="number" data-column={run.name}>
                    {measure.text(measure.value(run))}
                    {index > 0 && measure.isCompared === true && comparison.runs[0] !== undefined ? (
                      <Difference value={measure.value(run)} first={measure.value(comparison.runs[0])} />
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

function Configurations({ comparison }: { comparison: CompareDocument }): JSX.Element {
  return (
    <Section title="Configuration" note={comparison.num_same === 0 ? undefined : `${countOf(comparison.num_same, "other key")} identical, including defaults`}>
      {comparison.differences.length === 0 ? (
        <EmptyState title={comparison.num_same > 0 ? "No differences" : "Nothing to compare"}>
          {comparison.num_same > 0 ? "The runs have the same configuration." : "The configurations of fewer than two of these runs are known."}
        </EmptyState>
      ) : (
        <TableBox>
          <table class="compare">
            <caption class="visually-hidden">Keys that differ</caption>
            <thead>
              <tr>
                <th scope="col">Key</th>
                <RunHeads comparison={comparison} />
              </tr>
            </thead>
            <tbody>
              {comparison.differences.map((one) => (
                <tr key={one.key}>
                  <th scope="row">
                    <code>{one.key}</code>
                  </th>
                  {one.values.map((value, index) => (
                    <td key={comparison.runs[index]?.name} class="number" data-column={comparison.runs[index]?.name}>
                      {value === null ? <span class="faint">unknown</span> : <code>{value}</code>}
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

const rounded = (step: number | null): number | null => (step === null ? null : Math.round(step));
const zoom = (begin: number | null, end: number | null): void =>
  setParams({ begin: rounded(begin), end: rounded(end) }, { isNewEntry: true });

function Charts({ comparison }: { comparison: CompareDocument }): JSX.Element {
  const [scale, setScale] = useParam("loss", "linear");
  const isLog = scale === "log";
  const shared = { steps: comparison.step, names: comparison.runs.map((run) => run.name), onZoom: zoom };
  const hasMfu = comparison.runs.some((run) => run.median_mfu !== null);
  const log: ComponentChildren = <Switch label="log" isOn={isLog} onChange={(isOn) => setScale(isOn ? "log" : "linear")} />;
  return (
    <div class="charts">
      <Lines {...shared} title="Loss" tools={log} values={comparison.runs.map((run) => run.loss)} text={(value) => numberText(value, 4)} isLog={isLog} />
      <Lines {...shared} title="Step time" values={comparison.runs.map((run) => run.step_s)} text={durationText} fromZero />
      <Lines {...shared} title="Tokens per s" values={comparison.runs.map((run) => run.tokens_per_s)} text={largeText} fromZero />
      {hasMfu ? <Lines {...shared} title="MFU" values={comparison.runs.map((run) => run.mfu)} text={percentText} fromZero /> : null}
    </div>
  );
}

function Notes({ comparison, isZoomed }: { comparison: CompareDocument; isZoomed: boolean }): JSX.Element {
  const sampled = comparison.runs.filter((run) => run.is_sampled).map((run) => run.name);
  return (
    <>
      {isZoomed ? (
        <p class="zoom-line">
          <span class="faint">
            Showing steps {countText(comparison.step[0])} to {countText(comparison.step[comparison.step.length - 1])}.
          </span>{" "}
          <button type="button" class="button small" onClick={() => zoom(null, null)}>
            Show all
          </button>
        </p>
      ) : null}
      {comparison.runs.flatMap((run) =>
        run.problems.map((problem) => (
          <p key={`${run.name} ${problem}`} class="stale-line">
            {run.name}: {sentence(problem)}
          </p>
        )),
      )}
      {comparison.stride > 1 || sampled.length > 0 ? (
        <p class="faint">
          {comparison.stride > 1 ? `Each point is the median of ${countText(comparison.stride)} steps; drag to zoom in. ` : ""}
          {sampled.length > 0 ? `Only a sample of evenly spaced steps was read of ${sampled.join(" and ")}.` : ""}
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
        {(comparison) => (
          <>
            <Notes comparison={comparison} isZoomed={begin !== null || end !== null} />
            <Charts comparison={comparison} />
            <div class="columns">
              <Summary comparison={comparison} />
              <Configurations comparison={comparison} />
            </div>
          </>
        )}
      </Loaded>
    </>
  );
}
