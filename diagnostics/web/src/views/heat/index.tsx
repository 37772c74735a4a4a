// The heat map: which ranks or hosts were slow, in which step and operation.

import "./heat.css";

import type { JSX } from "preact";
import { useCallback, useState } from "preact/hooks";

import { apiUrl } from "../../api/client";
import { job, shownRound } from "../../app/job";
import { RoundSelect } from "../../app/round_select";
import { isWholeRun } from "../../app/range";
import { hrefOf, setParams, useNumberParam } from "../../app/location";
import type { HeatPicture } from "../../canvas/heat-picture";
import { CopyButton, DownloadButton, Segmented, Select } from "../../ui/controls";
import { countOf, countText } from "../../ui/format";
import { ViewHead } from "../../ui/section";
import { EmptyState, ErrorState, Skeleton } from "../../ui/states";
import { Legend } from "./legend";
import { useLivePicture } from "./live-picture";
import { Outliers } from "./outliers";
import { cursorOf, Picture, type Spot } from "./picture";
import {
  cellsQuery, DEVICE_METRICS, isOfDevices, MEASURES, orders, pictureQuery, ROWS, SCALES, useHeatChoice, type HeatChoice,
} from "./query";
import { Readout, useCell, valueText } from "./readout";
import { useZoom } from "./zoom";

function Controls({ choice }: { choice: HeatChoice }): JSX.Element {
  const operations = (job.value?.operations ?? []).map((one) => ({ value: one.name, label: one.name }));
  const subjects = [...operations, ...DEVICE_METRICS];
  return (
    <div class="picture-controls" role="group" aria-label="Display options">
      <Select label="operation" options={subjects} value={choice.operation} onChange={(value) => choice.set("operation", value)} />
      {isOfDevices(choice) ? null : (
        <Select label="measure" options={MEASURES} value={choice.measure} onChange={(value) => choice.set("measure", value)} />
      )}
      <Segmented label="scale" options={SCALES} value={choice.scale} onChange={(value) => choice.set("scale", value)} />
      <Segmented label="rows" options={ROWS} value={choice.by} onChange={(value) => choice.set("by", value)} />
      <Select label="by" options={orders()} value={choice.order} onChange={(value) => choice.set("order", value)} />
    </div>
  );
}

interface ShownProps {
  picture: HeatPicture;
  choice: HeatChoice;
  spot: Spot | null;
  setSpot: (spot: Spot | null, isByHand: boolean) => void;
}

function Shown({ picture, choice, spot, setSpot }: ShownProps): JSX.Element {
  const zoom = useZoom(picture);
  const cursor = cursorOf(picture, spot);
  const cell = useCell(picture, cursor, cellsQuery(choice));
  const announced = cell === null ? "" : `rank ${cell.rank}, step ${cell.step}, ${valueText(cell.value, cell.unit)}`;
  return (
    <>
      <Legend picture={picture} />
      <Picture picture={picture} zoom={zoom} spot={spot} setSpot={setSpot} />
      <div class="heat-below">
        <Readout picture={picture} cursor={cursor} cell={cell} />
        {zoom.hasAllRows ? null : (
          <button type="button" class="button small" onClick={() => zoom.set({ ...zoom.window, top: 0, bottom: picture.numRows })}>
            All {picture.by}s
          </button>
        )}
      </div>
      <p class="visually-hidden" role="status" aria-live="polite">
        {announced}
      </p>
    </>
  );
}

function noteOf(picture: HeatPicture | null): string {
  if (picture === null || picture.numColumns === 0) {
    return "";
  }
  const rows = countOf(picture.numRows * picture.rowsPerBin, picture.by);
  const shared = picture.stepsPerBin > 1 ? `, ${picture.stepsPerBin} steps per column (maximum shown)` : "";
  return `${rows}, steps ${picture.firstStep} to ${picture.lastStep}${shared}`;
}

function NoStep(): JSX.Element {
  const shown = shownRound.value;
  if (shown !== null && shown.first_step !== null && !isWholeRun.value) {
    return (
      <EmptyState
        title="No recorded steps in this range"
        action={<a href={hrefOf("heat", { from: null, to: null })}>Show the whole run</a>}
      >
        Ranks of round {shown.number} have reported steps {countText(shown.first_step)} to {countText(shown.last_step)}.
      </EmptyState>
    );
  }
  return (
    <EmptyState title="No steps recorded yet" action={<a href={hrefOf("overview")}>Show the state of the job</a>}>
      No rank of round {shown?.number ?? "?"} has reported the times of a step yet. Ranks report each second from their first step on.
    </EmptyState>
  );
}

export function HeatView(): JSX.Element {
  const choice = useHeatChoice();
  const query = pictureQuery(choice);
  const { picture, error, reload } = useLivePicture(query);
  const [rank] = useNumberParam("rank");
  const [step] = useNumberParam("step");
  const [hovered, setHovered] = useState<Spot | null>(null);
  const fixed = rank === null || step === null ? null : { rank, step };
  const setSpot = useCallback((spot: Spot | null, isByHand: boolean): void => {
    setHovered(spot);
    if (isByHand) {
      setParams({ rank: spot?.rank, step: spot?.step });
    }
  }, []);
  const show = useCallback((atRank: number, atStep: number): void => setSpot({ rank: atRank, step: atStep }, true), []);
  const spot = hovered ?? fixed;
  return (
    <>
      <ViewHead title="Heat map" note={noteOf(picture)}>
        <RoundSelect />
        <DownloadButton url={apiUrl("heat.csv", query)}>CSV</DownloadButton>
        <CopyButton text={() => window.location.href}>Copy link</CopyButton>
      </ViewHead>
      <Controls choice={choice} />
      {error === null ? null : <ErrorState error={error} onRetry={reload} />}
      <div class="heat-layout">
        <div class="heat-main">
          {picture === null ? (
            error === null ? <Skeleton lines={14} /> : null
          ) : picture.numColumns === 0 ? (
            <NoStep />
          ) : (
            <Shown picture={picture} choice={choice} spot={spot} setSpot={setSpot} />
          )}
        </div>
        <Outliers choice={choice} chosenRank={spot?.rank ?? null} show={show} />
      </div>
    </>
  );
}
