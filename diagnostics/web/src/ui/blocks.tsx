// A table whose columns do not fit: each row becomes a block, with the column's name above each value. Measured, so that it holds
// for any table at any width and size of text.

import type { ComponentChildren, JSX, RefObject } from "preact";
import { useCallback, useEffect, useLayoutEffect, useRef } from "preact/hooks";

const BLOCKS = "is-blocks";

function laidOut(box: HTMLElement): void {
  box.classList.remove(BLOCKS);
  box.classList.toggle(BLOCKS, box.scrollWidth > box.clientWidth);
}

/** Lay the table in a box out as rows, or as blocks where its rows are wider than the box. */
export function useBlocks(box: RefObject<HTMLElement | null>, isOn: boolean): void {
  const width = useRef(-1);
  const fit = useCallback((): void => {
    if (box.current !== null && isOn) {
      laidOut(box.current);
    }
  }, [isOn]);
  useLayoutEffect(fit);
  useEffect(() => {
    const element = box.current;
    if (element === null) {
      return undefined;
    }
    const observer = new ResizeObserver(() => {
      // its height changes with the layout itself
      if (element.clientWidth !== width.current) {
        width.current = element.clientWidth;
        fit();
      }
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, [fit]);
}

/** The box of a table that is written out by hand. */
export function TableBox({ children }: { children: ComponentChildren }): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  useBlocks(box, true);
  return (
    <div class="table-box" ref={box}>
      {children}
    </div>
  );
}
