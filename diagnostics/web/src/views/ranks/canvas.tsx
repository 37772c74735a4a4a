// The grid's canvas: pan, zoom, cursor.

import type { JSX, TargetedKeyboardEvent } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";

import { shownTheme, token } from "../../app/preferences";
import { tripleOfHex } from "../../canvas/colors";
import {
  clampedGrid, rankAt, rankBeside, centerOf, wholeGrid, zoomedGrid, type RanksPicture, type GridView,
} from "../../canvas/ranks-picture";
import {
  ranksImage, RANKS_FONT_PX, RANKS_LEFT, RANKS_TOP, paintRanksPicture, rankColors, type RanksColor,
} from "../../canvas/ranks-painter";
import { peersOf } from "../../canvas/layout";
import type { RanksStyle } from "../../canvas/ranks-marks";
import { fitted, fontOf, useFrame, useSize } from "../../canvas/surface";
import { countOf } from "../../ui/format";

const WHEEL_ZOOM = 1.002;
const KEY_ZOOM = 1.5;
const CLICK_PX = 4;

interface CanvasProps {
  picture: RanksPicture;
  color: RanksColor;
  hasArrows: boolean;
  rank: number | null;
  setRank: (rank: number) => void;
  setHovered: (rank: number) => void;
}

function styleOf(element: HTMLElement): RanksStyle {
  return {
    theme: shownTheme.peek(),
    background: tripleOfHex(token("--surface")),
    ink: token("--ink"),
    inkSoft: token("--ink-soft"),
    inkFaint: token("--ink-faint"),
    line: token("--line"),
    accent: token("--accent"),
    bad: token("--bad"),
    badInk: token("--bad-ink"),
    mark: token("--mark"),
    font: fontOf(element, RANKS_FONT_PX),
  };
}

export function RanksCanvas({ picture, color, hasArrows, rank, setRank, setHovered }: CanvasProps): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const size = useSize(box);
  const theme = shownTheme.value;
  const { layout, shape } = picture;
  const width = Math.max(1, size.width - RANKS_LEFT - 8);
  const height = Math.max(1, size.height - RANKS_TOP - 4);
  const shapeKey = `${shape.inner} ${shape.stages} ${shape.replicas}`;
  const whole = useMemo(() => wholeGrid(shape, width, height), [shapeKey, width, height]);
  // null: show the whole grid, also after the canvas is resized
  const moved = useRef<GridView | null>(null);
  const viewNow = (): GridView => (moved.current === null ? whole : clampedGrid(shape, moved.current, width, height));
  const drag = useRef<{ x: number; y: number; view: GridView; hasMoved: boolean } | null>(null);

  const colors = useMemo(() => rankColors(picture, color, theme), [picture, color, theme]);
  const image = useMemo(() => {
    const drawn = ranksImage(shape, colors);
    const target = document.createElement("canvas");
    target.width = drawn.width;
    target.height = drawn.height;
    const pixels = new Uint8ClampedArray(drawn.pixels.buffer as ArrayBuffer);
    target.getContext("2d")?.putImageData(new ImageData(pixels, drawn.width, drawn.height), 0, 0);
    return target;
  }, [colors, shapeKey]);
  const peers = useMemo(() => {
    if (rank === null || rank >= picture.numRanks) {
      return new Set<number>();
    }
    return new Set(Object.values(peersOf(layout, rank)).flat().filter((other) => other !== rank));
  }, [rank, shapeKey, picture.numRanks]);

  const paint = useFrame(() => {
    const target = canvas.current;
    const context = fitted(target, size);
    if (target === null || context === null) {
      return;
    }
    const began = performance.now();
    const view = viewNow();
    const scene = { picture, colors, image, hasArrows, cursor: rank ?? -1, peers };
    const painted = paintRanksPicture(context, scene, view, size, styleOf(target));
    Object.assign(target.dataset, {
      ranks: String(picture.numRanks),
      arrows: String(painted.numArrows),
      letters: String(painted.numLetters),
      cards: String(painted.numCards),
      marks: String(painted.numMarks),
      cursor: rank === null ? "" : String(rank),
      paintedMs: (performance.now() - began).toFixed(2),
      cell: view.cell.toFixed(2),
    });
  });
  useEffect(paint, [picture, colors, image, hasArrows, rank, peers, size, theme, whole]);

  const show = (next: GridView): void => {
    moved.current = clampedGrid(shape, next, width, height);
    paint();
  };
  const pointOf = (event: { clientX: number; clientY: number; currentTarget: Element }): { x: number; y: number } => {
    const rect = event.currentTarget.getBoundingClientRect();
    return { x: event.clientX - rect.left - RANKS_LEFT, y: event.clientY - rect.top - RANKS_TOP };
  };
  const onWheel = (event: WheelEvent): void => {
    event.preventDefault();
    const rect = (event.currentTarget as Element).getBoundingClientRect();
    const x = event.clientX - rect.left - RANKS_LEFT;
    const y = event.clientY - rect.top - RANKS_TOP;
    const delta = event.deltaY * (event.deltaMode === 1 ? 24 : 1);
    const view = viewNow();
    if (event.shiftKey) {
      show({ ...view, y: view.y - (delta || event.deltaX) });
    } else {
      show(zoomedGrid(shape, view, WHEEL_ZOOM ** -delta, x, y, whole));
    }
  };
  const wheel = useRef(onWheel);
  wheel.current = onWheel;
  useEffect(() => {
    // not passive: the page must not scroll while the grid zooms
    const target = canvas.current;
    const listen = (event: WheelEvent): void => wheel.current(event);
    target?.addEventListener("wheel", listen, { passive: false });
    return () => target?.removeEventListener("wheel", listen);
  }, []);
  const reveal = (next: number): void => {
    const view = viewNow();
    const { x, y } = centerOf(shape, view, next);
    const byX = x < 0 ? -x + view.cell : x > width ? width - x - view.cell : 0;
    const byY = y < 0 ? -y + view.line : y > height ? height - y - view.line : 0;
    if (byX !== 0 || byY !== 0) {
      show({ ...view, x: view.x + byX, y: view.y + byY });
    }
  };
  const onKeyDown = (event: TargetedKeyboardEvent<HTMLCanvasElement>): void => {
    if (event.altKey || event.metaKey || event.ctrlKey) {
      return;
    }
    const here = rank ?? 0;
    const next = rank === null && event.key.startsWith("Arrow") ? 0 : rankBeside(shape, here, event.key);
    if (next !== here || (rank === null && event.key.startsWith("Arrow"))) {
      setRank(next);
      reveal(next);
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const view = viewNow();
      const at = centerOf(shape, view, here);
      show(zoomedGrid(shape, view, event.key === "-" ? 1 / KEY_ZOOM : KEY_ZOOM, at.x, at.y, whole));
      reveal(here);
    } else if (event.key === "0") {
      moved.current = null;
      paint();
    } else {
      return;
    }
    event.preventDefault();
  };

  return (
    <div class="picture ranks-picture" ref={box}>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="application"
        aria-roledescription="grid of ranks"
        aria-label={`${countOf(picture.numRanks, "rank")}: ${countOf(shape.stages, "stage")} across, ${countOf(shape.replicas, "replica")} down, ${countOf(shape.inner, "rank")} in each. Arrow keys move, plus and minus zoom. The table of ranks has the same content.`}
        data-testid="ranks-canvas"
        onPointerDown={(event) => {
          event.currentTarget.setPointerCapture(event.pointerId);
          event.currentTarget.focus({ preventScroll: true });
          drag.current = { ...pointOf(event), view: viewNow(), hasMoved: false };
        }}
        onPointerMove={(event) => {
          const at = pointOf(event);
          const began = drag.current;
          if (began === null) {
            setHovered(rankAt(shape, viewNow(), at.x, at.y));
            return;
          }
          began.hasMoved ||= Math.abs(at.x - began.x) > CLICK_PX || Math.abs(at.y - began.y) > CLICK_PX;
          if (began.hasMoved) {
            show({ ...began.view, x: began.view.x + at.x - began.x, y: began.view.y + at.y - began.y });
          }
        }}
        onPointerUp={(event) => {
          const at = pointOf(event);
          const found = rankAt(shape, viewNow(), at.x, at.y);
          if (drag.current !== null && !drag.current.hasMoved && found >= 0) {
            setRank(found);
          }
          drag.current = null;
        }}
        onPointerCancel={() => {
          drag.current = null;
        }}
        onPointerLeave={() => setHovered(-1)}
        onKeyDown={onKeyDown}
      />
    </div>
  );
}
