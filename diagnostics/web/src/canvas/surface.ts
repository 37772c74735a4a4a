// Canvases that match the size and resolution of their area on the screen, drawn at most once per frame.

import { useEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

export interface Size {
  /** In CSS pixels. */
  width: number;
  height: number;
  /** Device pixels per CSS pixel. */
  ratio: number;
}

const NO_SIZE: Size = { width: 0, height: 0, ratio: 1 };
// A higher ratio is not visibly sharper, and doubling it takes four times as long to draw.
const MOST_RATIO = 2;

/** Return the current size of an element; the component is drawn again when it changes. */
export function useSize(element: RefObject<HTMLElement | null>): Size {
  const [size, setSize] = useState<Size>(NO_SIZE);
  useEffect(() => {
    const target = element.current;
    if (target === null) {
      return undefined;
    }
    const measure = (): void => {
      const ratio = Math.min(MOST_RATIO, window.devicePixelRatio || 1);
      const next = { width: Math.floor(target.clientWidth), height: Math.floor(target.clientHeight), ratio };
      setSize((old) => (old.width === next.width && old.height === next.height && old.ratio === next.ratio ? old : next));
    };
    const observer = new ResizeObserver(measure);
    observer.observe(target);
    measure();
    return () => observer.disconnect();
  }, []);
  return size;
}

/** Resize a canvas; return its context in CSS pixels, null if there is no area to draw on. */
export function fitted(canvas: HTMLCanvasElement | null, size: Size): CanvasRenderingContext2D | null {
  const context = canvas?.getContext("2d") ?? null;
  if (canvas === null || context === null || size.width === 0 || size.height === 0) {
    return null;
  }
  const width = Math.round(size.width * size.ratio);
  const height = Math.round(size.height * size.ratio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  context.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
  return context;
}

/** Return a function that schedules `draw` for the next frame, once however often it is called. */
export function useFrame(draw: () => void): () => void {
  const latest = useRef(draw);
  latest.current = draw;
  const pending = useRef(0);
  useEffect(() => () => window.cancelAnimationFrame(pending.current), []);
  const schedule = useRef(() => {
    if (pending.current === 0) {
      pending.current = window.requestAnimationFrame(() => {
        pending.current = 0;
        latest.current();
      });
    }
  });
  return schedule.current;
}

// The text size that sizes here refer to; text on a canvas scales with the text size of the page.
const USUAL_TEXT_PX = 16;

/** Return the font of an element at a size, for text on its canvas; `most`: the maximum size that fits a line. */
export function fontOf(element: Element, px: number, most: number = Number.POSITIVE_INFINITY): string {
  const text = Number.parseFloat(getComputedStyle(document.documentElement).fontSize) || USUAL_TEXT_PX;
  return `${Math.min(most, (px * text) / USUAL_TEXT_PX)}px ${getComputedStyle(element).fontFamily}`;
}
