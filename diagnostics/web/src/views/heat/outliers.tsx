// A table of the twenty ranks farthest above their peers, for screen readers and for quick access.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";

import type { HeatOutlierDocument, HeatOutliersDocument } from "../../api/documents";
import { useResource } from "../../api/resource";
import { hrefOf } from "../../app/location";
import { numberText, timesText } from "../../ui/format";
import { Section } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { cellsQuery, type HeatChoice } from "./query";
import { valueText } from "./readout";

function columnsOf(
  axes: string, unit: string, farZ: number, show: (rank: number, step: number) => void,
): Column<HeatOutlierDocument>[] {
  return [
    {
      key: "rank",
      label: "Rank",
      isNumber: true,
      sort: (row) => row.rank,
      render: (row) => (
        <button type="button" class="cell-button" onClick={() => show(row.rank, row.step)} title="show this cell in the heat map">
          {row.rank}
        </button>
      ),
    },
    { key: "host", label: "Host", className: "host", sort: (row) => row.host, render: (row) => row.host },
    {
      key: "place", label: axes, title: "index along each axis",
      render: (row) => <span class="faint">{Object.values(row.place).join(" ")}</span>,
    },
    {
      key: "step",
      label: "Step",
      isNumber: true,
      sort: (row) => row.step,
      render: (row) => <a href={hrefOf("timeline", { rank: row.rank, first: row.step, last: row.step })}>{row.step}</a>,
    },
    { key: "value", label: unit === "s" ? "Duration" : "Value", isNumber: true, sort: (row) => row.value, render: (row) => valueText(row.value, unit) },
    { key: "ratio", label: "Ratio to peers", isNumber: true, sort: (row) => row.ratio, render: (row) => timesText(row.ratio) },
    {
      key: "z", label: "z-score", isNumber: true, sort: (row) => row.z, render: (row) => numberText(row.z),
      title: "robust standard deviations above the median of its peers",
    },
    {
      key: "far", label: "Outlier steps", isNumber: true, sort: (row) => row.num_steps, render: (row) => row.num_steps,
      title: `number of shown steps in which its z-score was at least ${numberText(farZ)}, the threshold of a straggler`,
    },
  ];
}

interface OutliersProps {
  choice: HeatChoice;
  chosenRank: number | null;
  show: (rank: number, step: number) => void;
}

export function Outliers({ choice, chosenRank, show }: OutliersProps): JSX.Element {
  const resource = useResource<HeatOutliersDocument>("heat/outliers", cellsQuery(choice), "heat");
  const unit = resource.data?.unit ?? "s";
  const farZ = resource.data?.far_z ?? 0;
  const axes = Object.keys(resource.data?.outliers[0]?.place ?? {}).join(" ");
  const columns = useMemo(() => columnsOf(axes, unit, farZ, show), [axes, unit, farZ, show]);
  return (
    <Section title="Outliers" note="at most 20 ranks, each with its worst step" className="heat-outliers">
      <Loaded resource={resource} lines={8}>
        {(found) =>
          found.outliers.every((one) => one.num_steps === 0) ? (
            <EmptyState title="No outliers">
              No rank had a z-score of {numberText(farZ)} or more in any of these steps, or no rank has peers that do the same work.
            </EmptyState>
          ) : (
            <Table
              caption="Ranks that were farthest above their peers"
              columns={columns}
              rows={found.outliers.filter((one) => one.num_steps > 0)}
              rowKey={(row) => String(row.rank)}
              sortParam="outliers"
              isChosen={(row) => row.rank === chosenRank}
            />
          )
        }
      </Loaded>
    </Section>
  );
}
