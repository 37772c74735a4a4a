// The findings: host or ranks, steps, confidence and evidence.

import type { JSX } from "preact";

import type { FindingDocument, StragglersDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { Badge, type Tone } from "../../ui/badge";
import type { Shape } from "../../ui/icons";
import { countOf, countText, durationText, percentText, ranksText, scoreText, sentence } from "../../ui/format";
import { Section } from "../../ui/section";

const CONFIDENCE: Record<string, { tone: Tone; shape: Shape }> = {
  high: { tone: "bad", shape: "octagon" },
  low: { tone: "warning", shape: "triangle" },
  insufficient: { tone: "quiet", shape: "ring" },
};

function placeText(finding: FindingDocument): string {
  if (finding.hosts.length > 0) {
    return finding.hosts.slice(0, 3).join(", ") + (finding.hosts.length > 3 ? ` and ${finding.hosts.length - 3} more` : "");
  }
  return finding.stage === null ? `${finding.ranks.length === 1 ? "rank" : "ranks"} ${ranksText(finding.ranks, 4)}` : `stage ${finding.stage}`;
}

function Links({ finding, number }: { finding: FindingDocument; number: number }): JSX.Element {
  const rank = finding.ranks[0];
  const span = { from: finding.first_step, to: finding.last_step, round: number };
  return (
    <span class="links">
      {rank === undefined ? null : <a href={hrefOf("heat", { ...span, rank })}>heat map</a>}
      {rank === undefined ? null : <a href={hrefOf("ranks", { rank, round: number })}>rank {rank}</a>}
      {finding.hosts[0] === undefined ? null : <a href={hrefOf(["hosts", finding.hosts[0]])}>host</a>}
    </span>
  );
}

function Finding({ finding, number }: { finding: FindingDocument; number: number }): JSX.Element {
  const known = CONFIDENCE[finding.confidence] ?? { tone: "quiet" as const, shape: "ring" as const };
  return (
    <li class={finding.is_over ? "finding is-faint" : "finding"}>
      <div class="finding-head">
        <Badge tone={known.tone} shape={known.shape} title={`confidence ${finding.confidence}`}>
          {finding.confidence === "insufficient" ? "insufficient evidence" : `${finding.confidence} confidence`}
        </Badge>
        <strong>{placeText(finding)}</strong>
        <span>cause: {finding.cause}</span>
        {finding.is_over ? <span class="faint">over</span> : null}
        <Links finding={finding} number={number} />
      </div>
      <dl class="finding-figures">
        <div>
          <dt title="time per step beyond that of its peers, which do the same work (excess)">excess per step</dt>
          <dd>
            {durationText(finding.excess_s)} <span class="faint">{percentText(finding.excess)}</span>
          </dd>
        </div>
        <div>
          <dt title="how much shorter a step would be if these ranks were as fast as their peers">possible gain per step</dt>
          <dd>
            {durationText(finding.gain_s)} <span class="faint">of {durationText(finding.step_s)}</span>
          </dd>
        </div>
        <div>
          <dt title="robust standard deviations above its peers; a straggler has at least diagnostics.straggler_score">score</dt>
          <dd>{scoreText(finding.score)}</dd>
        </div>
        <div>
          <dt>slow in</dt>
          <dd>
            {countText(finding.num_seen)} <span class="faint">of {countOf(finding.num_steps, "step")}</span>
          </dd>
        </div>
        <div>
          <dt>steps</dt>
          <dd>
            {countText(finding.first_step)}
            {"\u2013"}
            {countText(finding.last_step)}
          </dd>
        </div>
        <div>
          <dt>victims</dt>
          <dd>{countOf(finding.num_victims, "rank")}</dd>
        </div>
      </dl>
      <ul class="evidence">
        {finding.evidence.map((line) => (
          <li key={line}>{line}</li>
        ))}
      </ul>
    </li>
  );
}

export function Findings({ document }: { document: StragglersDocument }): JSX.Element {
  const note =
    document.first_step === null
      ? undefined
      : `steps ${countText(document.first_step)} to ${countText(document.last_step)}, ${
          document.source === "daemon" ? "judged by the daemon" : "computed from the records"
        }`;
  return (
    <Section title="Findings" note={note}>
      <p class="lead reading">{sentence(document.headline)}</p>
      {document.is_enough ? null : (
        <p class="soft reading">
          Too few steps are recorded to score ranks: {countOf(document.num_steps, "step")} so far. Findings appear after more steps.
        </p>
      )}
      {document.findings.length === 0 ? null : (
        <ul class="findings">
          {document.findings.map((finding) => (
            <Finding
              key={`${finding.cause} ${finding.ranks.join(",")} ${finding.first_step}`}
              finding={finding}
              number={document.round}
            />
          ))}
        </ul>
      )}
      {document.silent_ranks.length === 0 ? null : (
        <p class="soft">Not judged, because they send no data: {countOf(document.silent_ranks.length, "rank")} ({ranksText(document.silent_ranks, 10)}).</p>
      )}
      {document.ranks_without_peers.length === 0 ? null : (
        <p class="soft">Not judged, because no other rank does the same work: {countOf(document.ranks_without_peers.length, "rank")} ({ranksText(document.ranks_without_peers, 10)}).</p>
      )}
    </Section>
  );
}
