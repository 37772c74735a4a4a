// The legend: colors of slices, and the letters drawn on them.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";

import { shownTheme } from "../../app/preferences";
import { cssOf, operationColor } from "../../canvas/colors";
import { SHORT_NAMES } from "../../canvas/timeline-marks";
import type { TimelinePicture } from "../../canvas/timeline-picture";

export function Legend({ picture }: { picture: TimelinePicture }): JSX.Element {
  const theme = shownTheme.value;
  const names = useMemo(
    () => [...new Set(picture.operation)].sort((a, b) => a - b).map((number) => picture.operations[String(number)] ?? ""),
    [picture],
  );
  return (
    <ul class="picture-key" aria-label="Legend of colors and letters" data-testid="timeline-legend">
      {names
        .filter((name) => name !== "")
        .map((name) => (
          <li key={name}>
            <span class="picture-swatch" style={{ backgroundColor: cssOf(operationColor(name, theme)) }} aria-hidden="true" />
            {SHORT_NAMES[name] === undefined ? null : <code>{SHORT_NAMES[name]}</code>}
            {name}
          </li>
        ))}
      <li class="faint">the number on a slice is its micro-batch</li>
    </ul>
  );
}
