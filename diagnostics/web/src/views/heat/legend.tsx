// The legend of the heat map's colors.

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { shownTheme } from "../../app/preferences";
import { cssOf, mapOf } from "../../canvas/colors";
import type { HeatPicture } from "../../canvas/heat-picture";
import { numberText, timesText } from "../../ui/format";
import { valueText } from "./readout";

const WIDTH = 200;
const HEIGHT = 12;

function endText(picture: HeatPicture, value: number): string {
  if (picture.scale === "relative") {
    return timesText(value, 2);
  }
  return picture.scale === "z" ? numberText(value) : valueText(value, picture.unit);
}

const MEANING: Record<string, string> = {
  relative: "times the median of its peers; gray may be chance",
  z: "robust standard deviations above the median of its peers; gray may be chance",
  absolute: "as measured",
};

export function Legend({ picture }: { picture: HeatPicture }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const theme = shownTheme.value;
  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (context) {
      const colorAt = mapOf(picture.scale, theme);
      for (let x = 0; x < WIDTH; x += 1) {
        context.fillStyle = cssOf(colorAt(x / (WIDTH - 1)));
        context.fillRect(x, 0, 1, HEIGHT);
      }
    }
  }, [picture.scale, theme]);
  const isCutLow = picture.least < picture.low;
  const isCutHigh = picture.greatest > picture.high;
  return (
    <div class="heat-legend">
      <span class="number">{`${isCutLow ? "\u2264 " : ""}${endText(picture, picture.low)}`}</span>
      <canvas ref={canvas} width={WIDTH} height={HEIGHT} role="img" aria-label="color scale from low to high" />
      <span class="number" title={`maximum: ${endText(picture, picture.greatest)}`}>
        {`${isCutHigh ? "\u2265 " : ""}${endText(picture, picture.high)}`}
      </span>
      <span class="faint">{MEANING[picture.scale]}</span>
      <span class="faint heat-no-data">
        <span class="heat-nothing" aria-hidden="true" />
        no data
      </span>
    </div>
  );
}
