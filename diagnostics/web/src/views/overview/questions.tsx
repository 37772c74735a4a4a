// What everybody asks who opens the page, in this order: is it healthy, is it fast, when does it end. The first answer
// has every reason why it is not healthy.

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
  warning: "It needs a look",
  bad: "No",
  over: "It is over",
  unknown: "Not known",
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

function Healthy({ told }: { told: OverviewDocument }): JSX.Element {
  const health = healthOf(told);
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
        {sentence(told.headline)}
        {told.since_unix_s === null ? null : (
          <span class="faint">
            , since <TimeText at={told.since_unix_s} />
          </span>
        )}
      </p>
      <Reasons told={told} />
    </Question>
  );
}

function Fast({ told }: { told: OverviewDocument }): JSX.Element {
  const hasMfu = told.mfu !== null;
  return (
    <Question
      text="Is it fast?"
      answer={
        hasMfu ? (
          <span title="FLOPs of the model, nothing for recomputation, by the peak of the hardware">
            {percentText(told.mfu)} <span class="question-unit">MFU</span>
          </span>
        ) : (
          <span>
            {largeText(told.tokens_per_s)} <span class="question-unit">tokens/s</span>
          </span>
        )
      }
    >
      <dl class="question-facts">
        {hasMfu ? <Row label="tokens per s">{largeText(told.tokens_per_s)}</Row> : null}
        <Row label="a step takes">{durationText(told.step_s)}</Row>
        <Row label="training time" title="Time in steps that count, by all time since the job began (MegaScale sec. 6.3)">
          {percentText(told.effective_time_ratio)} <span class="faint">last hour {percentText(told.effective_time_ratio_last_hour)}</span>
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

function Ends({ told }: { told: OverviewDocument }): JSX.Element {
  const step = shownStep.value;
  const progress = step === null || told.train_steps === null ? null : Math.min(1, step / told.train_steps);
  const ends = told.remaining_s === null ? null : told.at_unix_s + told.remaining_s;
  return (
    <Question
      text="When does it end?"
      answer={
        healthOf(told) === "over" ? "It has ended" : told.remaining_s === null ? "Not known" : <>in {durationText(told.remaining_s)}</>
      }
    >
      <dl class="question-facts">
        {ends === null ? null : (
          <Row label="at this pace on">{minuteText(ends, clock.value)}</Row>
        )}
        <Row label="step">
          <span data-figure="step">{countText(step)}</span>{" "}
          <span class="faint">
            {told.train_steps === null ? "without end" : `of ${countText(told.train_steps)}, ${percentText(progress)}`}
          </span>
        </Row>
        <Row label="last step">
          <Age at={told.last_step_unix_s} />
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

export function Questions({ told }: { told: OverviewDocument }): JSX.Element {
  return (
    <div class="questions">
      <Healthy told={told} />
      <Fast told={told} />
      <Ends told={told} />
    </div>
  );
}
