// A canvas at the size and sharpness of its place on the screen, and drawing at most once a frame.

import { useEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

export interface Size {
  /** In CSS pixels. */
  width: number;
  height: number;
  /** Device pixels a CSS pixel. */
  ratio: number;
}

const NO_SIZE: Size = { width: 0, height: 0, ratio: 1 };
// Above this a picture is not sharper to anybody, but four times as much to draw.
const MOST_RATIO = 2;

/** Return the size of an element as it changes. */
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

/** Make a canvas fit a size; return its context in CSS pixels, null where there is nothing to draw on. */
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

/** Return a function that has `draw` called in the next frame, once, however often it is called before. */
export function useFrame(draw: () => void): () => void {
  const latest = useRef(draw);
  latest.current = draw;
  const pending = useRef(0);
  useEffect(() => () => window.cancelAnimationFrame(pending.current), []);
  const ask = useRef(() => {
    if (pending.current === 0) {
      pending.current = window.requestAnimationFrame(() => {
        pending.current = 0;
        latest.current();
      });
    }
  });
  return ask.current;
}

// The size of text that sizes here are meant for; where the page is larger, text on a canvas is, too.
const USUAL_TEXT_PX = 16;

/** Return the font of an element at a size, for text on its canvas; `most`: what a line there has room for. */
export function fontOf(element: Element, px: number, most: number = Number.POSITIVE_INFINITY): string {
  const text = Number.parseFloat(getComputedStyle(document.documentElement).fontSize) || USUAL_TEXT_PX;
  return `${Math.min(most, (px * text) / USUAL_TEXT_PX)}px ${getComputedStyle(element).fontFamily}`;
}
