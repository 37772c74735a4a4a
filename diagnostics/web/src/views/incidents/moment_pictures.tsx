// Previews of the grid of ranks and of the heat map of an incident's round; each links to the full view.

import type { ComponentChildren, JSX } from "preact";

import type { ApiError } from "../../api/client";
import type { IncidentDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { wholeWindow, type HeatPicture } from "../../canvas/heat-picture";
import type { RanksPicture } from "../../canvas/ranks-picture";
import { sentence } from "../../ui/format";
import { Section } from "../../ui/section";
import { Skeleton } from "../../ui/states";
import { RanksCanvas } from "../ranks/canvas";
import { useLiveRanks } from "../ranks/live-ranks";
import { useLivePicture } from "../heat/live-picture";
import { Picture } from "../heat/picture";

const OPERATION = "forward-compute";
const NUM_STEPS = 60;

const nothing = (): void => undefined;

interface PreviewProps {
  title: string;
  note: string;
  href: string;
  error: ApiError | null;
  children: ComponentChildren;
}

/** A picture without interaction: a click opens the full view. */
function Preview({ title, note, href, error, children }: PreviewProps): JSX.Element {
  return (
    <Section title={title} note={note} tools={<a href={href}>open</a>}>
      {children === null ? (
        error === null ? <Skeleton lines={5} /> : <p class="soft">{sentence(error.message)}</p>
      ) : (
        <div class="preview">
          <div inert>{children}</div>
          <a class="preview-link" href={href} aria-label={`${title}: open the full view`} tabIndex={-1} />
        </div>
      )}
    </Section>
  );
}

/** The rank to mark: the first culprit, or the first rank of the first culprit's host. */
function markedRank(incident: IncidentDocument, picture: RanksPicture): number | null {
  const host = picture.hosts.indexOf(incident.hosts[0] ?? "");
  const rank = incident.ranks[0] ?? (host < 0 ? -1 : picture.host.indexOf(host));
  return rank >= 0 && rank < picture.numRanks ? rank : null;
}

export function MomentRanks({ incident }: { incident: IncidentDocument }): JSX.Element {
  const { picture, error } = useLiveRanks(incident.round);
  const rank = picture === null ? null : markedRank(incident, picture);
  const isRunning = incident.next_round === null && (incident.state === "held" || incident.state === "open");
  return (
    <Preview
      title={`Ranks of round ${incident.round}`}
      note={isRunning ? "current state" : "state at the end of the round"}
      href={hrefOf("ranks", { round: incident.round, rank: rank ?? incident.ranks[0] })}
      error={error}
    >
      {picture === null ? null : (
        <RanksCanvas picture={picture} color="state" hasArrows rank={rank} setRank={nothing} setHovered={nothing} />
      )}
    </Preview>
  );
}

function stepsNote(picture: HeatPicture | null): string {
  return picture === null || picture.numColumns === 0
    ? OPERATION
    : `${OPERATION} compared with peers, steps ${picture.firstStep} to ${picture.lastStep}`;
}

export function MomentHeat({ incident }: { incident: IncidentDocument }): JSX.Element {
  const last = incident.last_step;
  const first = last === null ? null : Math.max(0, last - NUM_STEPS);
  const { round } = incident;
  const choice = { round, operation: OPERATION, first, last: last === null ? null : last + 1 };
  const { picture, error } = useLivePicture({ ...choice, measure: "sum", scale: "relative", by: "rank", sort: "rank" });
  const rank = incident.ranks[0];
  const spot = rank === undefined || last === null ? null : { rank, step: last };
  return (
    <Preview title="Heat map before the incident" note={stepsNote(picture)} href={hrefOf("heat", { round, from: first, to: choice.last, rank, step: last })} error={error}>
      {picture === null ? null : picture.numColumns === 0 ? (
        <p class="soft">No data for these steps.</p>
      ) : (
        <Picture
          picture={picture}
          zoom={{ window: wholeWindow(picture), hasAllRows: true, set: nothing, reset: nothing }}
          spot={spot}
          setSpot={nothing}
        />
      )}
    </Preview>
  );
}
