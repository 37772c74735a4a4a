// One verdict: the culprit, the cause and the evidence, and whether acting on it is worth its cost.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { VerdictDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { Bars } from "../../ui/bars";
import { Fact, Facts, TimeText } from "../../ui/figures";
import { countText, durationText, ranksText } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { ActionBar } from "../actions/action_bar";
import { HostLinks, Lines, OutcomeBadge } from "./parts";

function Economics({ verdict }: { verdict: VerdictDocument }): JSX.Element {
  if (verdict.gain_s <= 0 && verdict.cost_s <= 0) {
    return <p class="soft">Estimated gain: {durationText(verdict.gain_s_per_step)} per step. The driver has not compared it with a cost.</p>;
  }
  return (
    <Bars
      caption="Gain and cost of acting on the verdict"
      bars={[
        { key: "gain", label: "gain over the rest of the job", value: verdict.gain_s, text: durationText(verdict.gain_s) },
        { key: "cost", label: "cost of a restart", value: verdict.cost_s, text: durationText(verdict.cost_s), tone: "quiet" },
      ]}
    />
  );
}

export function VerdictBody({ verdict }: { verdict: VerdictDocument }): JSX.Element {
  return (
    <div class="stack">
      <Facts>
        <Fact label="outcome">
          <OutcomeBadge outcome={verdict.outcome} />
          {verdict.outcome_by === "" ? null : <span class="faint"> by {verdict.outcome_by}</span>}
        </Fact>
        {verdict.outcome_reason === "" ? null : <Fact label="reason">{verdict.outcome_reason}</Fact>}
        <Fact label="cause">{verdict.cause}</Fact>
        <Fact label="confidence">{verdict.confidence}</Fact>
        <Fact label="hosts">
          <HostLinks hosts={verdict.hosts} most={8} />
        </Fact>
        <Fact label="ranks">{ranksText(verdict.ranks, 10)}</Fact>
        <Fact label="steps">
          <a href={hrefOf("heat", { round: verdict.round, from: verdict.first_step, to: verdict.last_step, rank: verdict.ranks[0] })}>
            {countText(verdict.first_step)} to {countText(verdict.last_step)} of round {verdict.round}
          </a>
        </Fact>
        <Fact label="gain per step">
          {durationText(verdict.gain_s_per_step)} of {durationText(verdict.step_s)}
        </Fact>
        <Fact label="written">
          <TimeText at={verdict.created_unix_s} />
        </Fact>
      </Facts>
      <Economics verdict={verdict} />
      <Lines lines={verdict.evidence} none="No evidence is recorded." />
    </div>
  );
}

export function VerdictDetail({ id }: { id: string }): JSX.Element {
  const found = useResource<VerdictDocument>(`verdicts/${encodeURIComponent(id)}`, {}, "incidents");
  const verdict = found.data;
  return (
    <>
      <p class="crumbs">
        <a href={hrefOf("incidents")}>Incidents</a> / verdict {id}
      </p>
      <ViewHead title={verdict === null ? `Verdict ${id}` : `Verdict: ${verdict.cause === "" ? verdict.kind : verdict.cause}`}>
        {verdict !== null && verdict.outcome === "waiting" ? <ActionBar kinds={["approve", "dismiss"]} target={id} /> : null}
        {verdict === null || verdict.incident_id === "" ? null : (
          <a href={hrefOf(["incidents", verdict.incident_id])}>incident {verdict.incident_id}</a>
        )}
      </ViewHead>
      <Section title="Details">
        <Loaded resource={found}>{(one) => <VerdictBody verdict={one} />}</Loaded>
      </Section>
    </>
  );
}
