// What the cell under the cursor is, in words and exact: asked of the server a moment after the cursor stands still.

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
    return "nothing known";
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

/** The exact cell of a cursor; null while it is not known. */
export function useCell(picture: HeatPicture | null, cursor: HeatCursor | null, query: Query): HeatCellDocument | null {
  const [held, setHeld] = useState<{ key: string; cell: HeatCellDocument | null }>({ key: "", cell: null });
  const kept = useRef(new Map<string, HeatCellDocument>());
  const rank = picture === null || cursor === null ? undefined : picture.rowRank[cursor.row];
  const step = picture === null || cursor === null ? undefined : picture.columnStep[cursor.column];
  const asked = { ...query, first: undefined, last: undefined, rank, step, by: picture?.by, num_steps: picture?.stepsPerBin };
  const key = rank === undefined || step === undefined ? "" : JSON.stringify(asked);
  // A live picture gets its columns bit by bit: what was asked of another picture may have been less.
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
        () => undefined, // the picture itself tells what is wrong
      );
    }, STILL_MS);
    return () => {
      window.clearTimeout(timer);
      stop.abort();
    };
  }, [key, picture]);
  return held.key === key ? held.cell : null;
}

/** The colour of a cell as a number of its scale, until the exact value has come. */
export function levelText(picture: HeatPicture, cursor: HeatCursor): string {
  const code = picture.cells[cursor.row * picture.numColumns + cursor.column] ?? picture.noValue;
  if (code === picture.noValue) {
    return "nothing known";
  }
  const value = picture.low + (code * (picture.high - picture.low)) / (picture.numLevels - 1);
  const about = "about ";
  if (picture.scale === "relative") {
    return about + timesText(value);
  }
  return about + (picture.scale === "z" ? `${numberText(value)} spreads` : valueText(value, picture.unit));
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
        Point at a cell, or focus the picture and use the arrow keys. Drag to zoom in, Enter or a click opens the timeline.
      </p>
    );
  }
  const rank = cell?.rank ?? picture.rowRank[cursor.row] ?? 0;
  const step = cell?.step ?? picture.columnStep[cursor.column] ?? 0;
  const host = cell?.host ?? picture.hosts[picture.rowHost[cursor.row] ?? 0] ?? "";
  return (
    <p class="picture-readout" data-testid="heat-readout">
      <strong>rank {rank}</strong>
      <span>{host === "" ? "host not known" : host}</span>
      <span class="faint">{placeText(placeOf(picture.layout, rank))}</span>
      <span>step {step}</span>
      <strong>{cell === null ? levelText(picture, cursor) : valueText(cell.value, cell.unit)}</strong>
      {cell === null || cell.peers_median === null ? null : (
        <>
          <span title={`median of ${cell.num_peers} ranks that do the same work`}>
            peers {valueText(cell.peers_median, cell.unit)}
          </span>
          {cell.ratio === null ? null : <span>{timesText(cell.ratio)}</span>}
          {cell.z === null ? null : <span title="robust standard deviations above the median of its peers">{numberText(cell.z)} spreads</span>}
        </>
      )}
      <a href={hrefOf("timeline", { rank, first: step, last: step })}>timeline</a>
    </p>
  );
}
