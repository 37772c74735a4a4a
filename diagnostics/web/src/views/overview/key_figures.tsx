// The figures that are asked for first, in one row.

import type { JSX } from "preact";

import type { OverviewDocument } from "../../api/documents";
import { shownStep } from "../../app/job";
import { hrefOf } from "../../app/location";
import { nowS } from "../../ui/clocked";
import { Age, Figure, TimeText } from "../../ui/figures";
import { ageText, countText, durationText, largeText, numberText, percentText } from "../../ui/format";

function hostsNote(told: OverviewDocument): string {
  const { spare, cordoned, unfit, lost } = told.hosts;
  const parts = [`${countText(spare)} spare`];
  if (cordoned > 0) {
    parts.push(`${countText(cordoned)} cordoned`);
  }
  if (unfit > 0) {
    parts.push(`${countText(unfit)} unfit`);
  }
  if (lost > 0) {
    parts.push(`${countText(lost)} lost`);
  }
  return parts.join(", ");
}

function StepFigures({ told }: { told: OverviewDocument }): JSX.Element {
  const step = shownStep.value;
  const progress = step === null || told.train_steps === null ? null : step / told.train_steps;
  return (
    <>
      <Figure
        label="Step"
        value={<span data-figure="step">{countText(step)}</span>}
        note={told.train_steps === null ? "without end" : `of ${countText(told.train_steps)}, ${percentText(progress)}`}
        progress={progress}
        title="Completed by all ranks"
      />
      <Figure
        label="Last step"
        value={<Age at={told.last_step_unix_s} />}
        note={<TimeText at={told.last_step_unix_s} />}
      />
      <Figure label="Loss" value={numberText(told.loss, 4)} note={`grad norm ${numberText(told.grad_norm)}`} />
      <Figure label="Tokens" value={largeText(told.tokens)} note="counted once" />
      <Figure label="Tokens per s" value={largeText(told.tokens_per_s)} note="of the whole job" />
      <Figure
        label="MFU"
        value={percentText(told.mfu)}
        note="of the peak FLOPs"
        title="FLOPs of the model, nothing for recomputation, by the peak of the hardware"
      />
      <Figure label="Step time" value={durationText(told.step_s)} note="median of the newest" />
    </>
  );
}

export function KeyFigures({ told }: { told: OverviewDocument }): JSX.Element {
  const { checkpoint } = told;
  const written = checkpoint?.written_unix_s ?? null;
  return (
    <dl class="figures twelve">
      <StepFigures told={told} />
      <Figure
        label="Training time"
        value={percentText(told.effective_time_ratio)}
        note={`last hour ${percentText(told.effective_time_ratio_last_hour)}`}
        title="Time in steps that count, by all time since the job began (MegaScale sec. 6.3)"
      />
      <Figure
        label="Last checkpoint"
        value={checkpoint === null ? "none" : <a href={hrefOf("checkpoints")}>step {countText(checkpoint.step)}</a>}
        note={checkpoint === null ? "nothing to go back to" : written === null ? "" : ageText(nowS.value - written)}
      />
      <Figure
        label="Hosts training"
        value={
          <a href={hrefOf("hosts")}>
            {countText(told.hosts.training)}
            <span class="faint"> / {countText(told.hosts.total)}</span>
          </a>
        }
        note={hostsNote(told)}
      />
      <Figure
        label="Open incidents"
        value={<a href={hrefOf("incidents", { state: "open" })}>{countText(told.num_open_incidents)}</a>}
        note={`${countText(told.num_incidents)} in all`}
      />
      <Figure label="Remaining" value={durationText(told.remaining_s)} note="at this pace" />
    </dl>
  );
}
