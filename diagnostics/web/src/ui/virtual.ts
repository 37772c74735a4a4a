// Virtual lists: only visible rows are in the document, so a list of 100,000 lines costs as much as one of fifty.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

export interface Window {
  first: number;
  last: number;
  /** Height in pixels of the rows above and below the window. */
  before: number;
  after: number;
}

const OVERSCAN = 12;

/** Return which of `count` rows are visible in the scrolled element; each is `rowHeight` pixels high. */
export function useWindow(box: RefObject<HTMLElement | null>, count: number, rowHeight: number): Window {
  const [place, setPlace] = useState({ top: 0, height: 800 });
  const frame = useRef(0);

  useLayoutEffect(() => {
    const element = box.current;
    if (element === null) {
      return undefined;
    }
    const measure = (): void => {
      frame.current = 0;
      setPlace((old) =>
        old.top === element.scrollTop && old.height === element.clientHeight
          ? old
          : { top: element.scrollTop, height: element.clientHeight },
      );
    };
    const later = (): void => {
      if (frame.current === 0) {
        frame.current = requestAnimationFrame(measure);
      }
    };
    measure();
    element.addEventListener("scroll", later, { passive: true });
    const observer = new ResizeObserver(later);
    observer.observe(element);
    return () => {
      cancelAnimationFrame(frame.current);
      frame.current = 0;
      element.removeEventListener("scroll", later);
      observer.disconnect();
    };
  }, []);

  const first = Math.max(0, Math.min(count, Math.floor(place.top / rowHeight) - OVERSCAN));
  const last = Math.min(count, Math.ceil((place.top + place.height) / rowHeight) + OVERSCAN);
  return { first, last, before: first * rowHeight, after: Math.max(0, count - last) * rowHeight };
}

/** Return a length in rem as pixels; it follows the text size of the page. */
export function usePixels(rem: number): number {
  const [size, setSize] = useState(() => rem * rootFontSize());
  useEffect(() => {
    const update = (): void => setSize(rem * rootFontSize());
    window.addEventListener("resize", update);
    return () => window.removeEventListener("resize", update);
  }, [rem]);
  return size;
}

/** Return the pixels of 1 rem, which is larger on very wide screens. */
export function rootFontSize(): number {
  return Number.parseFloat(getComputedStyle(document.documentElement).fontSize) || 16;
}
