// The next automatic action, the last incident, and gaps in the recorded data.

import type { JSX } from "preact";

import type { IncidentDocument, OverviewDocument } from "../../api/documents";
import { job } from "../../app/job";
import { hrefOf } from "../../app/location";
import { Duration, Fact, Facts, TimeText } from "../../ui/figures";
import { countOf, countText, ranksText, sentence } from "../../ui/format";
import { Section } from "../../ui/section";
import { EmptyState } from "../../ui/states";
import { ActionBar } from "../actions/action_bar";
import { StateBadge } from "../incidents/parts";

const VERDICT_ACTIONS = ["approve", "dismiss"] as const;

export function NextAction({ status }: { status: OverviewDocument }): JSX.Element {
  const { what, why, verdict_id: verdictId } = status.next_action;
  return (
    <Section title="Next automatic action">
      <div class="stack tight">
        <p class="lead">{sentence(what)}</p>
        <p class="soft reading">{sentence(why)}</p>
        {verdictId === "" ? null : (
          <p class="row">
            <a href={hrefOf(["incidents", "verdicts", verdictId])}>verdict {verdictId}</a>
            <ActionBar kinds={VERDICT_ACTIONS} target={verdictId} isQuiet />
          </p>
        )}
        {job.value?.can_act === false ? <p class="faint reading">{sentence(job.value.why_not_act)}</p> : null}
      </div>
    </Section>
  );
}

interface LastIncidentProps {
  incident: IncidentDocument | null;
  num: number;
  isKnown: boolean;
}

export function LastIncident({ incident, num, isKnown }: LastIncidentProps): JSX.Element {
  const tools = num > 0 ? <a href={hrefOf("incidents")}>all {countText(num)}</a> : undefined;
  if (incident === null) {
    return (
      <Section title="Last incident" tools={tools}>
        {isKnown ? (
          <p class="soft">No incident since the job began.</p>
        ) : (
          <p class="faint">Not loaded yet.</p>
        )}
      </Section>
    );
  }
  return (
    <Section title="Last incident" tools={tools}>
      <div class="stack tight">
        <p class="row">
          <StateBadge state={incident.state} />
          <a class="lead" href={hrefOf(["incidents", incident.incident_id])}>
            {sentence(incident.kind_text)}
          </a>
        </p>
        <p class="soft reading">{incident.reason}</p>
        <Facts>
          <Fact label="began">
            <TimeText at={incident.began_unix_s} />
          </Fact>
          <Fact label="action taken">{incident.action}</Fact>
          <Fact label="cost">
            <Duration seconds={incident.down_s} />
            {incident.steps_lost === null ? "" : `, ${countOf(incident.steps_lost, "step")} lost`}
          </Fact>
        </Facts>
      </div>
    </Section>
  );
}

/** Gaps in the recorded data: a dead daemon, silent ranks, dropped events and unusable records. */
export function DataGaps({ status }: { status: OverviewDocument }): JSX.Element {
  const { diagnosis } = status;
  const isWhole =
    diagnosis.is_daemon_alive !== false &&
    diagnosis.num_silent_ranks === 0 &&
    diagnosis.rows_dropped + diagnosis.rows_refused === 0 &&
    diagnosis.problems.length === 0;
  return (
    <Section title="Gaps in the data">
      {isWhole ? (
        <p class="soft">
          None{diagnosis.is_daemon_alive === null ? "." : ": the daemon receives data from every rank."}
        </p>
      ) : (
        <div class="stack tight">
          <Facts>
            {diagnosis.is_daemon_alive === false ? <Fact label="daemon">not running: no new data is recorded</Fact> : null}
            {diagnosis.num_silent_ranks > 0 ? (
              <Fact label="silent">
                {countOf(diagnosis.num_silent_ranks, "rank")}:{" "}
                <a href={hrefOf("ranks", { rank: diagnosis.silent_ranks[0] ?? 0, round: null })}>{ranksText(diagnosis.silent_ranks, 8)}</a>
              </Fact>
            ) : null}
            {diagnosis.rows_dropped > 0 ? (
              <Fact label="dropped">{countOf(diagnosis.rows_dropped, "event")}: hosts sent more than was accepted</Fact>
            ) : null}
            {diagnosis.rows_refused > 0 ? <Fact label="rejected">{countOf(diagnosis.rows_refused, "event")}</Fact> : null}
          </Facts>
          {diagnosis.problems.length === 0 ? null : (
            <EmptyState title="Unusable records">
              {diagnosis.problems.map((problem) => (
                <span key={problem} class="line">
                  {problem}
                </span>
              ))}
            </EmptyState>
          )}
        </div>
      )}
    </Section>
  );
}
