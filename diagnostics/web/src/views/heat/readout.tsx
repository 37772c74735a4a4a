// The exact value of the cell at the cursor, requested from the server shortly after the cursor stops.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { getJson, type Query } from "../../api/client";
import type { HeatCellDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import type { HeatPicture } from "../../canvas/heat-picture";
import type { HeatCursor } from "../../canvas/heat-painter";
import { placeOf, placeText } from "../../canvas/layout";
import { bytesText, countOf, durationText, memoryText, numberText, timesText } from "../../ui/format";

const STILL_MS = 90;
const NUM_KEPT = 400;

export function valueText(value: number | null, unit: string): string {
  if (value === null) {
    return "no data";
  }
  const texts: Record<string, (value: number) => string> = {
    s: durationText,
    bytes: bytesText,
    "bytes of memory": memoryText,
    spans: (count) => countOf(count, "span"),
    errors: (count) => countOf(count, "error"),
  };
  return texts[unit]?.(value) ?? `${numberText(value)} ${unit === "C" ? "\u00b0C" : unit}`;
}

/** Return the exact cell at the cursor; null until it is loaded. */
export function useCell(picture: HeatPicture | null, cursor: HeatCursor | null, query: Query): HeatCellDocument | null {
  const [held, setHeld] = useState<{ key: string; cell: HeatCellDocument | null }>({ key: "", cell: null });
  const kept = useRef(new Map<string, HeatCellDocument>());
  const rank = picture === null || cursor === null ? undefined : picture.rowRank[cursor.row];
  const step = picture === null || cursor === null ? undefined : picture.columnStep[cursor.column];
  const asked = {
    ...query, first: undefined, last: undefined, rank, step, scale: picture?.scale, by: picture?.by, num_steps: picture?.stepsPerBin,
  };
  const key = rank === undefined || step === undefined ? "" : JSON.stringify(asked);
  // The columns of a live picture fill gradually, so values read for an earlier picture may be incomplete.
  const seen = useRef<HeatPicture | null>(null);
  if (seen.current !== picture) {
    seen.current = picture;
    kept.current.clear();
  }
  useEffect(() => {
    const found = kept.current.get(key);
    if (key === "" || found !== undefined) {
      setHeld({ key, cell: found ?? null });
      return undefined;
    }
    const stop = new AbortController();
    const timer = window.setTimeout(() => {
      getJson<HeatCellDocument>("heat/cell", asked, stop.signal).then(
        (cell) => {
          if (kept.current.size >= NUM_KEPT) {
            kept.current.clear();
          }
          kept.current.set(key, cell);
          setHeld({ key, cell });
        },
        () => undefined, // errors are shown by the picture itself
      );
    }, STILL_MS);
    return () => {
      window.clearTimeout(timer);
      stop.abort();
    };
  }, [key, picture]);
  return held.key === key ? held.cell : null;
}

/** Return the approximate value of a cell from its level, shown until the exact value is loaded. */
export function levelText(picture: HeatPicture, cursor: HeatCursor): string {
  const code = picture.cells[cursor.row * picture.numColumns + cursor.column] ?? picture.noValue;
  if (code === picture.noValue) {
    return "no data";
  }
  const value = picture.low + (code * (picture.high - picture.low)) / (picture.numLevels - 1);
  const about = "about ";
  if (picture.scale === "relative") {
    return about + timesText(value);
  }
  return about + (picture.scale === "z" ? `z ${numberText(value)}` : valueText(value, picture.unit));
}

interface ReadoutProps {
  picture: HeatPicture;
  cursor: HeatCursor | null;
  cell: HeatCellDocument | null;
}

export function Readout({ picture, cursor, cell }: ReadoutProps): JSX.Element {
  if (cursor === null) {
    return (
      <p class="picture-readout faint">
        Point at a cell, or focus the picture and use the arrow keys. Drag to zoom in; Enter or a click opens the timeline.
      </p>
    );
  }
  const rank = cell?.rank ?? picture.rowRank[cursor.row] ?? 0;
  const step = cell?.step ?? picture.columnStep[cursor.column] ?? 0;
  const host = cell?.host ?? picture.hosts[picture.rowHost[cursor.row] ?? 0] ?? "";
  return (
    <p class="picture-readout" data-testid="heat-readout">
      <strong>rank {rank}</strong>
      <span>{host === "" ? "unknown host" : host}</span>
      <span class="faint">{placeText(placeOf(picture.layout, rank))}</span>
      <span>step {step}</span>
      <strong>{cell === null ? levelText(picture, cursor) : valueText(cell.value, cell.unit)}</strong>
      {cell === null || cell.peers_median === null ? null : (
        <>
          <span title={`median of ${cell.num_peers} ranks that do the same work`}>
            peers {valueText(cell.peers_median, cell.unit)}
          </span>
          {cell.ratio === null ? null : <span>{timesText(cell.ratio)}</span>}
          {cell.z === null ? null : <span title="robust standard deviations above the median of its peers">z {numberText(cell.z)}</span>}
        </>
      )}
      <a href={hrefOf("timeline", { rank, first: step, last: step })}>timeline</a>
    </p>
  );
}
