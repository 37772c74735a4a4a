// One rank: its place, groups, current operation, last log lines, stacks and black box.

import type { JSX } from "preact";

import type { LogLinesDocument, RankDocument } from "../../api/documents";
import { useResource } from "../../api/resource";
import { hrefOf } from "../../app/location";
import { placeText } from "../../canvas/layout";
import { Fact, Facts, TimeText } from "../../ui/figures";
import { countText, ranksText, scoreText } from "../../ui/format";
import { Section } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";

const NUM_LINES = 40;

function groupText(one: { first_rank: number; num_ranks: number; stride: number }): string {
  if (one.stride === 0) {
    return `${one.num_ranks} ranks`;
  }
  return ranksText(Array.from({ length: Math.min(one.num_ranks, 4096) }, (_, place) => one.first_rank + place * one.stride), 4);
}

function RankFacts({ rank }: { rank: RankDocument }): JSX.Element {
  return (
    <>
      {rank.findings.map((text) => (
        <p key={text} class="ranks-finding">
          {text}
        </p>
      ))}
      <Facts>
        <Fact label="host">{rank.host === "" ? "unknown" : <a href={hrefOf(["hosts", rank.host])}>{rank.host}</a>}</Fact>
        <Fact label="coordinate">{placeText(rank.place, ", ")}</Fact>
        <Fact label="step">{countText(rank.step)}</Fact>
        <Fact label="operation">{rank.operation === "" ? "unknown" : rank.operation}</Fact>
        {rank.phase === "" ? null : <Fact label="phase">{rank.phase}</Fact>}
        <Fact label="process">
          {rank.pid === null ? "unknown" : rank.pid}
          {rank.process_state === "" ? "" : `, state ${rank.process_state}`}
        </Fact>
        <Fact label="straggler score">
          {scoreText(rank.score)}
          {rank.least_score === null ? "" : `, straggler threshold ${scoreText(rank.least_score)}`}
        </Fact>
        <Fact label="black box">{rank.black_box === "" ? "none" : <code>{rank.black_box}</code>}</Fact>
      </Facts>
      <p class="ranks-links">
        <a href={hrefOf("timeline", { rank: rank.rank })}>timeline</a>
        <a href={hrefOf("heat", { rank: rank.rank, step: rank.step })}>heat map</a>
        <a href={hrefOf("logs", { ranks: rank.rank })}>all log lines</a>
      </p>
      <h3>Groups</h3>
      {rank.groups.length === 0 ? <p class="faint">This rank has reported no groups.</p> : null}
      <Facts>
        {rank.groups.map((one) => {
          const key = one.stride === 0 ? one.name : `${one.name}:${one.first_rank}+${one.num_ranks}x${one.stride}`;
          const at = rank.positions.find((position) => position.group === key);
          return (
            <Fact key={key} label={one.name}>
              {groupText(one)}
              {at === undefined ? null : (
                <span class="faint">
                  {" "}
                  entered {countText(at.entered)}, left {countText(at.left)}
                </span>
              )}
            </Fact>
          );
        })}
      </Facts>
      <h3>Stacks</h3>
      {rank.stacks.length === 0 ? (
        <p class="faint">No stacks of this rank were dumped. Stacks are dumped when the job hangs.</p>
      ) : (
        rank.stacks.map((stack) => (
          <details key={stack.thread} open={stack.thread === "MainThread"}>
            <summary>
              {stack.thread} <TimeText at={stack.at_unix_s} />
            </summary>
            <pre class="ranks-stack">{[...stack.frames].reverse().join("\n")}</pre>
          </details>
        ))
      )}
    </>
  );
}

function LogTail({ rank, round }: { rank: number; round: number }): JSX.Element {
  const lines = useResource<LogLinesDocument>("logs", { ranks: rank, round, limit: NUM_LINES }, "logs");
  const isNone = lines.error !== null && lines.error.status === 404;
  if (isNone) {
    return (
      <>
        <h3>Last log lines</h3>
        <p class="faint">No logs of the job are stored.</p>
      </>
    );
  }
  return (
    <>
      <h3>Last log lines</h3>
      <Loaded resource={lines} lines={4}>
        {(found) =>
          found.lines.length === 0 ? (
            <p class="faint">No log lines of this rank are stored.</p>
          ) : (
            <pre class="ranks-log" tabIndex={0} aria-label={`last log lines of rank ${rank}`}>
              {found.lines.map((line) => line.line).join("\n")}
            </pre>
          )
        }
      </Loaded>
    </>
  );
}

export function RankPanel({ rank, round }: { rank: number | null; round: number }): JSX.Element {
  const path = rank === null ? null : `ranks/${rank}`;
  const resource = useResource<RankDocument>(path, { round }, "ranks");
  if (rank === null) {
    return (
      <Section title="Rank" className="ranks-panel">
        <EmptyState title="No rank selected">Click a cell, or focus the grid and use the arrow keys.</EmptyState>
      </Section>
    );
  }
  return (
    <Section title={`Rank ${rank}`} className="ranks-panel">
      <Loaded resource={resource} lines={8}>
        {(found) => <RankFacts rank={found} />}
      </Loaded>
      <LogTail rank={rank} round={round} />
    </Section>
  );
}
