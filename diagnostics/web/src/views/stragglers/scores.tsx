// Hosts ordered by straggler score.

import type { JSX } from "preact";

import type { StragglersDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { Bars } from "../../ui/bars";
import { scoreText, thresholdsText } from "../../ui/format";
import { Section } from "../../ui/section";

const MOST = 20;

export function Scores({ document }: { document: StragglersDocument }): JSX.Element {
  const least = document.thresholds?.score ?? null;
  const bars = document.scores.slice(0, MOST).map((one) => ({
    key: one.host,
    label: one.host,
    value: Math.max(0, one.score),
    text: scoreText(one.score),
    href: hrefOf(["hosts", one.host]),
    ...(least !== null && one.score >= least ? { tone: "warning" as const } : {}),
  }));
  return (
    <Section title="Hosts by straggler score" note={`robust standard deviations above their peers; ${thresholdsText(document.thresholds)}`}>
      {bars.length === 0 ? (
        <p class="soft">No host has a score yet.</p>
      ) : (
        <Bars caption="Straggler score of hosts, highest first" bars={bars} atLeast={least ?? 0} />
      )}
    </Section>
  );
}
