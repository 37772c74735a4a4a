// What happens next by itself, what was done last, and whether what is shown can be believed.

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

export function NextAction({ told }: { told: OverviewDocument }): JSX.Element {
  const { what, why, verdict_id: verdictId } = told.next_action;
  return (
    <Section title="What happens next by itself">
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
          <p class="soft">Nothing has gone wrong since the job began.</p>
        ) : (
          <p class="faint">Not known yet.</p>
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
          <Fact label="done about it">{incident.action}</Fact>
          <Fact label="cost">
            <Duration seconds={incident.down_s} />
            {incident.steps_lost === null ? "" : `, ${countOf(incident.steps_lost, "step")} lost`}
          </Fact>
        </Facts>
      </div>
    </Section>
  );
}

/** A dashboard that hears only half is worse than none if it does not say so. */
export function Trust({ told }: { told: OverviewDocument }): JSX.Element {
  const { diagnosis } = told;
  const isWhole =
    diagnosis.is_daemon_alive !== false &&
    diagnosis.num_silent_ranks === 0 &&
    diagnosis.rows_dropped + diagnosis.rows_refused === 0 &&
    diagnosis.problems.length === 0;
  return (
    <Section title="What the records leave out">
      {isWhole ? (
        <p class="soft">
          Nothing{diagnosis.is_daemon_alive === null ? "." : ": the daemon hears every rank."}
        </p>
      ) : (
        <div class="stack tight">
          <Facts>
            {diagnosis.is_daemon_alive === false ? <Fact label="daemon">does not run: nothing new is recorded</Fact> : null}
            {diagnosis.num_silent_ranks > 0 ? (
              <Fact label="silent">
                {countOf(diagnosis.num_silent_ranks, "rank")}:{" "}
                <a href={hrefOf("grid", { rank: diagnosis.silent_ranks[0] ?? 0, round: null })}>{ranksText(diagnosis.silent_ranks, 8)}</a>
              </Fact>
            ) : null}
            {diagnosis.rows_dropped > 0 ? (
              <Fact label="dropped">{countOf(diagnosis.rows_dropped, "event")}: hosts sent more than was taken</Fact>
            ) : null}
            {diagnosis.rows_refused > 0 ? <Fact label="refused">{countOf(diagnosis.rows_refused, "event")}</Fact> : null}
          </Facts>
          {diagnosis.problems.length === 0 ? null : (
            <EmptyState title="Records that cannot be used">
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
