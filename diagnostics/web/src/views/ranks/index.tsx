// All ranks in a grid of pipeline stages and replicas: their states, which rank waits for which, and which are suspects.

import "./ranks.css";

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";

import { shownRound } from "../../app/job";
import { RoundSelect } from "../../app/round_select";
import { hrefOf, setParams, useNumberParam, useParam } from "../../app/location";
import { shownTheme } from "../../app/preferences";
import { cssOf, operationColor } from "../../canvas/colors";
import { SUSPECT, type RanksPicture } from "../../canvas/ranks-picture";
import { rangeStops, stateColor, type RanksColor } from "../../canvas/ranks-painter";
import { axesText, placeOf, placeText } from "../../canvas/layout";
import { CopyButton, Segmented, Switch, TextField } from "../../ui/controls";
import { countOf, countText, numberText } from "../../ui/format";
import { ViewHead } from "../../ui/section";
import { ErrorState, Skeleton } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { RanksCanvas } from "./canvas";
import { useLiveRanks } from "./live-ranks";
import { RankPanel } from "./panel";

const COLORS = [
  { value: "state", label: "state" },
  { value: "step", label: "step" },
  { value: "operation", label: "last operation" },
  { value: "score", label: "score" },
];

interface KeyEntry {
  color: string;
  text: string;
  letter?: string;
}

function keyEntries(picture: RanksPicture, color: RanksColor): KeyEntry[] {
  const theme = shownTheme.value;
  if (color === "state") {
    const counts = new Array<number>(picture.states.length).fill(0);
    for (const state of picture.state) {
      counts[state] = (counts[state] ?? 0) + 1;
    }
    return picture.states.flatMap((one, state) =>
      counts[state] === 0
        ? []
        : [{ color: cssOf(stateColor(state, theme)), letter: one.letter, text: `${one.name}: ${countText(counts[state])}` }],
    );
  }
  if (color === "operation") {
    const seen = [...new Set(picture.operation)].sort((a, b) => a - b);
    return seen.map((number) => {
      const name = picture.operations[String(number)];
      return {
        color: cssOf(name === undefined ? stateColor(0, theme) : operationColor(name, theme)),
        text: name ?? "unknown",
      };
    });
  }
  return rangeStops(picture, color, theme).map((stop, place) => ({
    color: cssOf(stop.color),
    text: `${numberText(stop.value)}${color === "score" && place === 2 ? " or more" : ""}`,
  }));
}

function Key({ picture, color }: { picture: RanksPicture; color: RanksColor }): JSX.Element {
  if (color === "score" && !picture.hasScores) {
    return <p class="section-note">No scores: the diagnostics daemon is not judging this round.</p>;
  }
  return (
    <ul class="picture-key" aria-label="Legend of colors">
      {keyEntries(picture, color).map((entry) => (
        <li key={entry.text}>
          <span class="picture-swatch" style={{ backgroundColor: entry.color }} aria-hidden="true" />
          {(entry.letter ?? "") === "" ? null : <code>{entry.letter}</code>}
          {entry.text}
        </li>
      ))}
    </ul>
  );
}

interface RankRow {
  rank: number;
}

function columnsOf(picture: RanksPicture): Column<RankRow>[] {
  const at = (row: RankRow): string => {
    return Object.values(placeOf(picture.layout, row.rank)).join(" ");
  };
  const hostOf = (row: RankRow): string => picture.hosts[picture.host[row.rank] ?? 0] ?? "";
  const stateOf = (row: RankRow): number => picture.state[row.rank] ?? 0;
  const operationOf = (row: RankRow): string => picture.operations[String(picture.operation[row.rank])] ?? "";
  const scoreOf = (row: RankRow): number | null => {
    const score = picture.score[row.rank] ?? Number.NaN;
    return Number.isNaN(score) ? null : score;
  };
  const stepOf = (row: RankRow): number | null => {
    const step = picture.step[row.rank] ?? -1;
    return step < 0 ? null : step;
  };
  return [
    {
      key: "rank",
      label: "Rank",
      isNumber: true,
      sort: (row) => row.rank,
      render: (row) => <a href={hrefOf("ranks", { rank: row.rank, table: 1 })}>{row.rank}</a>,
    },
    { key: "host", label: "Host", className: "host", sort: hostOf, render: hostOf },
    { key: "state", label: "State", sort: stateOf, render: (row) => picture.states[stateOf(row)]?.name ?? "" },
    { key: "place", label: axesText(picture.layout), render: at },
    { key: "step", label: "Step", isNumber: true, sort: stepOf, render: (row) => countText(stepOf(row)) },
    { key: "operation", label: "Last operation", sort: operationOf, render: operationOf },
    { key: "score", label: "Score", isNumber: true, sort: scoreOf, render: (row) => numberText(scoreOf(row)) },
  ];
}

function RankTable({ picture, rank }: { picture: RanksPicture; rank: number | null }): JSX.Element {
  const rows = useMemo(() => Array.from({ length: picture.numRanks }, (_, number) => ({ rank: number })), [picture.numRanks]);
  const columns = useMemo(() => columnsOf(picture), [picture]);
  return (
    <Table
      caption="All ranks with their state"
      columns={columns}
      rows={rows}
      rowKey={(row) => String(row.rank)}
      defaultSort="-state"
      sortParam="ranks"
      isChosen={(row) => row.rank === rank}
    />
  );
}

function rankLine(picture: RanksPicture, rank: number): string {
  const host = picture.hosts[picture.host[rank] ?? 0] ?? "";
  const step = picture.step[rank] ?? -1;
  const operation = picture.operations[String(picture.operation[rank])] ?? "";
  const parts = [
    `rank ${rank}`,
    host === "" ? "unknown host" : host,
    placeText(placeOf(picture.layout, rank)),
    picture.states[picture.state[rank] ?? 0]?.name ?? "",
    step < 0 ? "" : `step ${step}`,
    operation,
  ];
  return parts.filter((part) => part !== "").join(", ");
}

function asColor(text: string): RanksColor {
  return text === "step" || text === "operation" || text === "score" ? text : "state";
}

function HangLine({ picture }: { picture: RanksPicture }): JSX.Element | null {
  if (!picture.hasHang) {
    return null;
  }
  const suspects = [...picture.state.keys()].filter((rank) => picture.state[rank] === SUSPECT);
  return (
    <p class="ranks-hang" role="status" data-testid="ranks-hang">
      <strong>{suspects.length === 0 ? "No suspect identified" : `Blocked by ${countOf(suspects.length, "rank")}`}</strong>
      <span>{picture.hangReason}</span>
      <span class="faint">source: {picture.hangSource}</span>
    </p>
  );
}

export function RanksView(): JSX.Element {
  const number = shownRound.value?.number;
  const { picture, error, reload } = useLiveRanks(number);
  const [colorText, setColor] = useParam("color", "state");
  const [rank] = useNumberParam("rank");
  const [table, setTable] = useParam("table", "0");
  const [arrows, setArrows] = useParam("arrows", "1");
  const [hovered, setHovered] = useState(-1);
  const color = asColor(colorText);
  const setRank = (next: number): void => setParams({ rank: next });
  const chosen = picture !== null && rank !== null && rank >= 0 && rank < picture.numRanks ? rank : null;
  const isUnknown = picture !== null && rank !== null && chosen === null;
  const shown = hovered >= 0 ? hovered : (chosen ?? -1);
  const note = picture === null ? "" : picture.layout.axes.map((one) => `${one.size} ${one.name}`).join(" \u00d7 ");
  return (
    <>
      <ViewHead title="Ranks" note={note}>
        <RoundSelect />
        <CopyButton text={() => window.location.href}>Copy link</CopyButton>
      </ViewHead>
      {error === null ? null : <ErrorState error={error} onRetry={reload} />}
      {picture === null ? (
        error === null ? <Skeleton lines={14} /> : null
      ) : (
        <>
          <HangLine picture={picture} />
          <div class="picture-controls" role="group" aria-label="Display options">
            <Segmented label="color" options={COLORS} value={color} onChange={setColor} />
            <TextField
              label="rank"
              value={chosen === null ? "" : String(chosen)}
              onChange={(text) => setParams({ rank: /^\d{1,9}$/.test(text) ? Number(text) : null })}
              size={6}
              isSearch
            />
            {isUnknown ? <span class="section-note tone-warning">no such rank; valid ranks are 0 to {picture.numRanks - 1}</span> : null}
            {picture.arrowKind.length > 0 ? (
              <Switch label="wait-for arrows" isOn={arrows === "1"} onChange={(isOn) => setArrows(isOn ? "1" : "0")} />
            ) : null}
            <Switch label="table" isOn={table === "1"} onChange={(isOn) => setTable(isOn ? "1" : "0")} />
          </div>
          <Key picture={picture} color={color} />
          <div class="ranks-layout">
            <div class="ranks-main">
              {table === "1" ? (
                <RankTable picture={picture} rank={chosen} />
              ) : (
                <>
                  <RanksCanvas
                    picture={picture}
                    color={color}
                    hasArrows={arrows === "1"}
                    rank={chosen}
                    setRank={setRank}
                    setHovered={setHovered}
                  />
                  <p class="picture-readout" data-testid="ranks-readout">
                    {shown < 0 || shown >= picture.numRanks ? "Mouse wheel or + and - to zoom, drag to move, arrow keys to select a rank." : rankLine(picture, shown)}
                  </p>
                  <p class="visually-hidden" role="status" aria-live="polite">
                    {chosen === null ? "" : rankLine(picture, chosen)}
                  </p>
                </>
              )}
            </div>
            <RankPanel rank={chosen} round={picture.round} />
          </div>
        </>
      )}
    </>
  );
}
