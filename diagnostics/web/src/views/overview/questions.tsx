// The three main questions: is the job healthy, is it fast, when does it end. The first answer lists all reasons why it is not
// healthy.

import type { ComponentChildren, JSX } from "preact";

import type { OverviewDocument } from "../../api/documents";
import { shownStep } from "../../app/job";
import { clock } from "../../app/preferences";
import { HEALTH, healthOf, type Health } from "../../ui/badge";
import { Age, TimeText } from "../../ui/figures";
import { countText, durationText, largeText, minuteText, percentText, sentence } from "../../ui/format";
import { ShapeIcon } from "../../ui/icons";
import { Reasons } from "./reasons";

const ANSWERS: Record<Health, string> = {
  good: "Yes",
  warning: "Needs attention",
  bad: "No",
  over: "The job has ended",
  unknown: "Unknown",
};

interface QuestionProps {
  text: string;
  answer: ComponentChildren;
  className?: string;
  children: ComponentChildren;
}

function Question({ text, answer, className = "", children }: QuestionProps): JSX.Element {
  return (
    <section class={`question ${className}`.trim()}>
      <h2>{text}</h2>
      <p class="question-answer">{answer}</p>
      {children}
    </section>
  );
}

function Healthy({ status }: { status: OverviewDocument }): JSX.Element {
  const health = healthOf(status);
  const { tone, shape } = HEALTH[health];
  return (
    <Question
      text="Is it healthy?"
      className={`question-health tone-${tone}`}
      answer={
        <>
          <ShapeIcon shape={shape} /> {ANSWERS[health]}
        </>
      }
    >
      <p class="soft reading">
        {sentence(status.headline)}
        {status.since_unix_s === null ? null : (
          <span class="faint">
            , since <TimeText at={status.since_unix_s} />
          </span>
        )}
      </p>
      <Reasons status={status} />
    </Question>
  );
}

function Fast({ status }: { status: OverviewDocument }): JSX.Element {
  const hasMfu = status.mfu !== null;
  return (
    <Question
      text="Is it fast?"
      answer={
        hasMfu ? (
          <span title="FLOPs of the model without recomputation, divided by the peak FLOPs of the hardware">
            {percentText(status.mfu)} <span class="question-unit">MFU</span>
          </span>
        ) : (
          <span>
            {largeText(status.tokens_per_s)} <span class="question-unit">tokens/s</span>
          </span>
        )
      }
    >
      <dl class="question-facts">
        {hasMfu ? <Row label="tokens per s">{largeText(status.tokens_per_s)}</Row> : null}
        <Row label="step time">{durationText(status.step_s)}</Row>
        <Row label="training time" title="Time in steps that count, divided by all time since the job began (MegaScale sec. 6.3)">
          {percentText(status.effective_time_ratio)} <span class="faint">last hour {percentText(status.effective_time_ratio_last_hour)}</span>
        </Row>
      </dl>
    </Question>
  );
}

function Row({ label, title, children }: { label: string; title?: string; children: ComponentChildren }): JSX.Element {
  return (
    <div title={title}>
      <dt>{label}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function Ends({ status }: { status: OverviewDocument }): JSX.Element {
  const step = shownStep.value;
  const progress = step === null || status.train_steps === null ? null : Math.min(1, step / status.train_steps);
  const ends = status.remaining_s === null ? null : status.at_unix_s + status.remaining_s;
  return (
    <Question
      text="When does it end?"
      answer={
        healthOf(status) === "over" ? "It has ended" : status.remaining_s === null ? "Unknown" : <>in {durationText(status.remaining_s)}</>
      }
    >
      <dl class="question-facts">
        {ends === null ? null : (
          <Row label="estimated end">{minuteText(ends, clock.value)}</Row>
        )}
        <Row label="step">
          <span data-figure="step">{countText(step)}</span>{" "}
          <span class="faint">
            {status.train_steps === null ? "no limit" : `of ${countText(status.train_steps)}, ${percentText(progress)}`}
          </span>
        </Row>
        <Row label="last step">
          <Age at={status.last_step_unix_s} />
        </Row>
      </dl>
      {progress === null ? null : (
        <p class="question-progress" aria-hidden="true">
          <span style={{ width: `${progress * 100}%` }} />
        </p>
      )}
    </Question>
  );
}

export function Questions({ status }: { status: OverviewDocument }): JSX.Element {
  return (
    <div class="questions">
      <Healthy status={status} />
      <Fast status={status} />
      <Ends status={status} />
    </div>
  );
}
