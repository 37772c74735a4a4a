// The other figures of the job, in one row below the three questions.

import type { JSX } from "preact";

import type { OverviewDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { nowS } from "../../ui/clocked";
import { Figure } from "../../ui/figures";
import { ageText, countText, largeText, numberText } from "../../ui/format";

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

export function KeyFigures({ told }: { told: OverviewDocument }): JSX.Element {
  const { checkpoint } = told;
  const written = checkpoint?.written_unix_s ?? null;
  return (
    <dl class="figures six">
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
      <Figure label="Loss" value={numberText(told.loss, 4)} />
      <Figure label="Gradient norm" value={numberText(told.grad_norm)} />
      <Figure label="Tokens" value={largeText(told.tokens)} note="those done again counted once" />
    </dl>
  );
}
