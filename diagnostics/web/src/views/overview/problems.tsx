// What is wrong, errors first, each with a way to the view that explains it. Nothing wrong is one calm line.

import type { JSX } from "preact";

import type { OverviewDocument, ProblemDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { ranksText } from "../../ui/format";
import { ShapeIcon } from "../../ui/icons";

const MOST_HOSTS = 4;

function Places({ problem }: { problem: ProblemDocument }): JSX.Element {
  const hosts = problem.hosts.slice(0, MOST_HOSTS);
  const rank = problem.ranks[0];
  return (
    <span class="problem-links">
      {hosts.map((host) => (
        <a key={host} href={hrefOf(["hosts", host])}>
          {host}
        </a>
      ))}
      {problem.hosts.length > MOST_HOSTS ? (
        <a href={hrefOf("hosts")}>and {problem.hosts.length - MOST_HOSTS} more hosts</a>
      ) : null}
      {rank === undefined ? null : (
        <>
          <a href={hrefOf("grid", { rank, round: null })}>
            {problem.ranks.length === 1 ? "rank" : "ranks"} {ranksText(problem.ranks, 4)}
          </a>
          <a href={hrefOf("logs", { round: null, ranks: problem.ranks.slice(0, 16).join(",") })}>logs</a>
        </>
      )}
    </span>
  );
}

function Problem({ problem }: { problem: ProblemDocument }): JSX.Element {
  return (
    <li class={problem.is_error ? "problem tone-bad" : "problem tone-warning"}>
      <span class="problem-kind">
        <ShapeIcon shape={problem.is_error ? "octagon" : "triangle"} />
        <span class="visually-hidden">{problem.is_error ? "error" : "warning"}: </span>
      </span>
      <span class="problem-text">{problem.text}</span>
      <Places problem={problem} />
    </li>
  );
}

const CALM: Record<string, string> = {
  good: "No problem is known.",
  over: "The job is over; what follows is its history.",
  unknown: "Whether the job is healthy is not known: etcd is out of reach. What follows is what the run directory tells.",
};

export function Problems({ told }: { told: OverviewDocument }): JSX.Element {
  const problems = [...told.problems].sort((a, b) => Number(b.is_error) - Number(a.is_error));
  return (
    <section class="problems" aria-label="Problems" data-num-problems={problems.length}>
      {problems.length === 0 ? (
        <p class="calm">{CALM[told.health] ?? told.headline}</p>
      ) : (
        <ul>
          {problems.map((problem) => (
            <Problem key={problem.text} problem={problem} />
          ))}
        </ul>
      )}
      {told.open_incident === "" ? null : (
        <p class="problem-more">
          <a href={hrefOf(["incidents", told.open_incident])}>What the system does about it: incident {told.open_incident}</a>
        </p>
      )}
    </section>
  );
}
