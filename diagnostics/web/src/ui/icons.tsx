// The icons of the page, drawn as SVG paths. The shape carries the same information as the color.

import type { JSX } from "preact";

export type Shape = "circle" | "triangle" | "octagon" | "ring" | "dashes" | "square" | "diamond";

const PATHS: Record<Exclude<Shape, "ring" | "dashes">, string> = {
  circle: "M6 1a5 5 0 1 1 0 10a5 5 0 1 1 0-10z",
  triangle: "M6 .8 11.6 10.8H.4z",
  octagon: "M3.7 .4h4.6l3.3 3.3v4.6l-3.3 3.3H3.7L.4 8.3V3.7z",
  square: "M1.5 1.5h9v9h-9z",
  diamond: "M6 .4 11.6 6 6 11.6 .4 6z",
};

export function ShapeIcon({ shape }: { shape: Shape }): JSX.Element {
  if (shape === "ring" || shape === "dashes") {
    return (
      <svg class="icon" viewBox="0 0 12 12" aria-hidden="true">
        <circle
          cx="6"
          cy="6"
          r="4.2"
          fill="none"
          stroke="currentColor"
          stroke-width="1.8"
          stroke-dasharray={shape === "dashes" ? "2.4 2" : undefined}
        />
      </svg>
    );
  }
  return (
    <svg class="icon" viewBox="0 0 12 12" aria-hidden="true">
      <path d={PATHS[shape]} fill="currentColor" />
      {shape === "octagon" ? <path d="M4.1 4.1l3.8 3.8M7.9 4.1 4.1 7.9" stroke="var(--surface)" stroke-width="1.5" /> : null}
    </svg>
  );
}

export function Chevron({ isUp }: { isUp: boolean }): JSX.Element {
  return (
    <svg class="icon chevron" viewBox="0 0 12 12" aria-hidden="true">
      <path d={isUp ? "M2 8l4-4 4 4" : "M2 4l4 4 4-4"} fill="none" stroke="currentColor" stroke-width="1.6" />
    </svg>
  );
}
