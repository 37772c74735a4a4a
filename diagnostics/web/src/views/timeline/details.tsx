// Details of the slice at the cursor.

import type { JSX } from "preact";

import { hrefOf } from "../../app/location";
import { placeOf, placeText } from "../../canvas/layout";
import {
  HAS_FAILED, IS_OPEN, lineOfSlice, NO_CHUNK, operationName, rankOfLine, type IdealPicture, type TimelinePicture,
} from "../../canvas/timeline-picture";
import { bytesText, durationText, timesText } from "../../ui/format";

/** "rank 3   pp 0  dp 1  tp 1   host-1" */
export function rankText(picture: TimelinePicture, rank: number): string {
  const place = picture.rank.indexOf(rank);
  const host = picture.hosts[picture.rankHost[place] ?? 0] ?? "";
  const at = placeText(placeOf(picture.layout, rank), "  ");
  return `rank ${rank}   ${at}${host === "" ? "" : `   ${host}`}`;
}

/** Return the slice as a sentence, for screen readers. */
export function sliceText(picture: TimelinePicture, slice: number): string {
  const rank = rankOfLine(picture, lineOfSlice(picture, slice));
  const micro = picture.microbatch[slice] ?? -1;
  const of = micro >= 0 ? `, micro-batch ${micro}` : "";
  return `${operationName(picture, slice)}${of}, rank ${rank}, step ${picture.step[slice]}, ${durationText((picture.length[slice] ?? 0) / 1e9)}`;
}

interface DetailsProps {
  picture: TimelinePicture;
  ideal: IdealPicture | null;
  slice: number;
}

/** The operation whose chunk is the number of a producer of pictures. */
const PICTURE_REQUESTS = "picture-requests";

export function Details({ picture, ideal, slice }: DetailsProps): JSX.Element {
  if (slice < 0 || slice >= picture.numSlices) {
    return (
      <p class="picture-readout faint">
        Mouse wheel or + and - to zoom, drag or Shift + arrow keys to move, arrow keys to select a slice, Shift + wheel to scroll.
      </p>
    );
  }
  const rank = rankOfLine(picture, lineOfSlice(picture, slice));
  const name = operationName(picture, slice);
  const micro = picture.microbatch[slice] ?? -1;
  const chunk = picture.chunk[slice] ?? NO_CHUNK;
  const flags = picture.flags[slice] ?? 0;
  const seconds = (picture.length[slice] ?? 0) / 1e9;
  const best = ideal === null ? -1 : (ideal.length[slice] ?? -1);
  const bytes = picture.bytes[slice] ?? 0;
  return (
    <p class="picture-readout" data-testid="timeline-details">
      <strong>{name}</strong>
      {micro >= 0 ? <span>micro-batch {micro}</span> : null}
      {chunk !== NO_CHUNK ? <span>{name === PICTURE_REQUESTS ? "producer" : "chunk"} {chunk}</span> : null}
      <span>
        <a href={hrefOf("ranks", { rank })}>rank {rank}</a>
      </span>
      <span>step {picture.step[slice]}</span>
      <strong>{durationText(seconds)}</strong>
      <span class="faint">from {durationText((picture.begin[slice] ?? 0) / 1e9)}</span>
      {bytes > 0 ? <span>{bytesText(bytes)}{seconds > 0 ? `, ${bytesText(bytes / seconds)}/s` : ""}</span> : null}
      {best >= 0 ? (
        <span>
          ideal {durationText(best / 1e9)}
          {best > 0 ? `, ${timesText((seconds * 1e9) / best)}` : ""}
        </span>
      ) : null}
      {ideal !== null && ideal.isCritical[slice] === 1 ? <strong>on the critical path</strong> : null}
      {(flags & IS_OPEN) !== 0 ? <strong>still open</strong> : null}
      {(flags & HAS_FAILED) !== 0 ? <strong>failed</strong> : null}
      <span class="faint">record {picture.sequence[slice]}</span>
    </p>
  );
}
