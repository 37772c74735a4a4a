// Key figures of the job, in one row below the three questions.

import type { JSX } from "preact";

import type { OverviewDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { nowS } from "../../ui/clocked";
import { Figure } from "../../ui/figures";
import { ageText, countText, largeText, numberText } from "../../ui/format";

function hostsNote(status: OverviewDocument): string {
  const { spare, cordoned, unfit, lost } = status.hosts;
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

export function KeyFigures({ status }: { status: OverviewDocument }): JSX.Element {
  const { checkpoint } = status;
  const written = checkpoint?.written_unix_s ?? null;
  return (
    <dl class="figures six">
      <Figure
        label="Last checkpoint"
        value={checkpoint === null ? "none" : <a href={hrefOf("checkpoints")}>step {countText(checkpoint.step)}</a>}
        note={checkpoint === null ? "a restart would begin at step 0" : written === null ? "" : ageText(nowS.value - written)}
      />
      <Figure
        label="Hosts training"
        value={
          <a href={hrefOf("hosts")}>
            {countText(status.hosts.training)}
            <span class="faint"> / {countText(status.hosts.total)}</span>
          </a>
        }
        note={hostsNote(status)}
      />
      <Figure
        label="Open incidents"
        value={<a href={hrefOf("incidents", { state: "open" })}>{countText(status.num_open_incidents)}</a>}
        note={`${countText(status.num_incidents)} in all`}
      />
      <Figure label="Loss" value={numberText(status.loss, 4)} />
      <Figure label="Gradient norm" value={numberText(status.grad_norm)} />
      <Figure label="Tokens" value={largeText(status.tokens)} note="repeated steps counted once" />
    </dl>
  );
}
