// In a table whose columns do not fit, each row becomes a block with the column's name above each value. The width is measured,
// so this works for any table, page width and text size.

import type { ComponentChildren, JSX, RefObject } from "preact";
import { useCallback, useEffect, useLayoutEffect, useRef } from "preact/hooks";

const BLOCKS = "is-blocks";

function laidOut(box: HTMLElement): void {
  box.classList.remove(BLOCKS);
  box.classList.toggle(BLOCKS, box.scrollWidth > box.clientWidth);
}

/** Show the table in a box as rows, or as blocks if its rows are wider than the box. */
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
      // only the width counts: switching the layout changes the height
      if (element.clientWidth !== width.current) {
        width.current = element.clientWidth;
        fit();
      }
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, [fit]);
}

/** The box around a hand-written table. */
export function TableBox({ children }: { children: ComponentChildren }): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  useBlocks(box, true);
  return (
    <div class="table-box" ref={box}>
      {children}
    </div>
  );
}
