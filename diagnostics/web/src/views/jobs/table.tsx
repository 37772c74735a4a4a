// The table of jobs. If the columns do not fit, each row becomes a block with the same content.

import type { ComponentChildren, JSX } from "preact";

import type { JobRow } from "../../api/documents";
import { pageOf } from "../../app/place";
import { Badge, type Tone } from "../../ui/badge";
import { Sparkline } from "../../ui/bars";
import { TableBox } from "../../ui/blocks";
import { Age } from "../../ui/figures";
import { countOf, countText, durationText, numberText, percentText } from "../../ui/format";
import type { Shape } from "../../ui/icons";

/** Return the badge of a job. An ended job that failed keeps the shape of a failure. */
function signOf(row: JobRow): { tone: Tone; shape: Shape } {
  if (row.level === "red") {
    return { tone: row.severity === "ended" ? "quiet" : "bad", shape: "octagon" };
  }
  if (row.severity === "ended") {
    return { tone: "quiet", shape: "ring" };
  }
  return row.level === "amber" ? { tone: "warning", shape: "triangle" } : { tone: "good", shape: "circle" };
}

function Why({ row }: { row: JobRow }): JSX.Element | null {
  const first = row.reasons[0];
  const text = first?.text ?? (row.is_over ? "" : row.headline);
  return (
    <>
      {text === "" ? null : (
        <p class={first === undefined || row.severity === "ended" ? "job-why" : `job-why tone-${first.level === "red" ? "bad" : "warning"}`} title={text}>
          {text}
          {row.num_reasons > 1 ? <span class="faint"> and {countText(row.num_reasons - 1)} more</span> : null}
        </p>
      )}
      {row.problems.map((problem) => (
        <p key={problem} class="job-why tone-warning" title={problem}>
          {problem}
        </p>
      ))}
    </>
  );
}

function Name({ row }: { row: JobRow }): JSX.Element {
  return (
    <>
      {row.why_not_opened === "" ? (
        <a class="job-name" href={pageOf(row.name)} title={row.run_directory}>
          {row.name}
        </a>
      ) : (
        <span class="job-name" title={row.why_not_opened}>
          {row.name}
        </span>
      )}
      {row.job !== row.name && !row.name.endsWith(`:${row.job}`) ? <span class="faint"> {row.job}</span> : null}
      {row.why_not_opened !== "" && row.url !== "" ? (
        <>
          {" "}
          <a href={row.url} rel="noreferrer">
            its own dashboard
          </a>
        </>
      ) : null}
      <Why row={row} />
    </>
  );
}

function Line({ values, label, text }: { values: readonly (number | null)[]; label: string; text: string }): JSX.Element {
  return (
    <span class="job-line">
      <Sparkline values={values} label={label} />
      <span>{text}</span>
    </span>
  );
}

function Progress({ row }: { row: JobRow }): JSX.Element {
  const part = row.step === null || row.train_steps === null || row.train_steps === 0 ? null : row.step / row.train_steps;
  return (
    <>
      <span>
        {countText(row.step)}
        {row.train_steps === null ? null : <span class="faint"> of {countText(row.train_steps)}</span>}
      </span>
      {part === null ? null : (
        <span class="job-progress" aria-hidden="true">
          <span style={{ width: `${Math.min(1, part) * 100}%` }} />
        </span>
      )}
      {row.remaining_s === null ? null : <span class="job-below">{durationText(row.remaining_s)} left</span>}
    </>
  );
}

/** A value, with small text below it. */
function Pair({ value, below }: { value: ComponentChildren; below: ComponentChildren }): JSX.Element {
  return (
    <>
      <span>{value}</span>
      <span class="job-below">{below}</span>
    </>
  );
}

function Size({ row }: { row: JobRow }): JSX.Element {
  const ranks = row.num_ranks === null ? "\u2013" : countOf(row.num_ranks, "rank");
  return row.num_hosts === null ? <>{ranks}</> : <Pair value={countOf(row.num_hosts, "host")} below={ranks} />;
}

function When({ row }: { row: JobRow }): JSX.Element {
  const hasEnded = row.is_over && row.ended_unix_s !== null;
  return (
    <Pair
      value={<Age at={row.began_unix_s} />}
      below={
        hasEnded ? (
          <>
            ended <Age at={row.ended_unix_s} />
          </>
        ) : null
      }
    />
  );
}

interface Cell {
  label: string;
  className: string;
  title?: string;
  render: (row: JobRow) => ComponentChildren;
}

const CELLS: readonly Cell[] = [
  {
    label: "Health",
    className: "job-health",
    render: (row) => (
      <Badge {...signOf(row)} title={row.headline}>
        {row.state}
        <span class="visually-hidden"> ({row.severity})</span>
      </Badge>
    ),
  },
  { label: "Job", className: "job-what", render: (row) => <Name row={row} /> },
  {
    label: "Loss",
    className: "job-loss",
    title: "Over steps; the number is the median of the newest 20 steps",
    render: (row) => <Line values={row.loss_line} label={`Loss of ${row.name}`} text={numberText(row.loss)} />,
  },
  {
    label: "Step time",
    className: "job-step-time",
    title: "Over steps; the number is the median of the newest 20 steps",
    render: (row) => <Line values={row.step_s_line} label={`Step time of ${row.name}`} text={durationText(row.step_s)} />,
  },
  { label: "Step", className: "number job-step", title: "Completed steps, and the remaining time at the current pace", render: (row) => <Progress row={row} /> },
  {
    label: "Training time",
    className: "number",
    title: "Time in steps that count, and its share of all time since the job began (MegaScale sec. 6.3)",
    render: (row) => <Pair value={durationText(row.training_s)} below={row.effective_time_ratio === null ? "" : percentText(row.effective_time_ratio)} />,
  },
  {
    label: "Checkpoint",
    className: "number",
    render: (row) => <Pair value={<Age at={row.saved_unix_s} />} below={row.saved_step === null ? "" : `step ${countText(row.saved_step)}`} />,
  },
  { label: "Size", className: "number", render: (row) => <Size row={row} /> },
  {
    label: "Incidents",
    className: "number",
    render: (row) => (row.num_incidents === 0 ? <span class="faint">none</span> : countText(row.num_incidents)),
  },
  { label: "Began", className: "number", render: (row) => <When row={row} /> },
];

interface JobTableProps {
  rows: readonly JobRow[];
  picked: readonly string[];
  choose: (name: string) => void;
}

export function JobTable({ rows, picked, choose }: JobTableProps): JSX.Element {
  return (
    <TableBox>
      <table class="jobs">
        <caption class="visually-hidden">Jobs</caption>
        <thead>
          <tr>
            <th scope="col">
              <span class="visually-hidden">Compare</span>
            </th>
            {CELLS.map((cell) => (
              <th key={cell.label} scope="col" class={cell.className} title={cell.title}>
                {cell.label}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.name} data-job={row.name} data-severity={row.severity}>
              <td class="job-pick">
                <input type="checkbox" aria-label={`Compare ${row.name}`} checked={picked.includes(row.name)} onChange={() => choose(row.name)} />
              </td>
              {CELLS.map((cell) => (
                <td key={cell.label} class={cell.className} data-column={cell.label}>
                  {cell.render(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </TableBox>
  );
}
