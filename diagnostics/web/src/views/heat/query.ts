// The query of the heat map; all of it is in the URL.

import { job, shownRound } from "../../app/job";
import { useParam } from "../../app/location";
import { rangeQuery } from "../../app/range";
import type { Query } from "../../api/client";

export const SCALES = [
  { value: "relative", label: "relative to peers", title: "ratio to the median of the ranks that do the same work" },
  { value: "z", label: "z-score", title: "robust standard deviations above the median of the ranks that do the same work" },
  { value: "absolute", label: "absolute", title: "as measured" },
];
export const MEASURES = [
  { value: "sum", label: "sum" },
  { value: "max", label: "longest" },
  { value: "count", label: "count" },
  { value: "bytes", label: "bytes" },
];
/** Metrics of GPUs and links, listed after the operations; see megatrain_dashboard/api/heat/subject.py. */
export const DEVICE_METRICS = [
  { value: "gpu-temperature", label: "GPU temperature" },
  { value: "gpu-memory-temperature", label: "GPU memory temperature" },
  { value: "gpu-clock-lost", label: "GPU clock below maximum" },
  { value: "gpu-power", label: "GPU power" },
  { value: "gpu-idle", label: "GPU idle time" },
  { value: "gpu-memory-used", label: "GPU memory used" },
  { value: "gpu-memory-errors", label: "GPU memory errors" },
  { value: "gpu-nvlink-errors", label: "NVLink errors" },
  { value: "link-errors", label: "network errors" },
];
/** Orders of rows, including one for each axis of the job. */
export function orders(): { value: string; label: string }[] {
  return [
    { value: "rank", label: "rank" },
    { value: "host", label: "host" },
    ...(job.value?.layout?.axes ?? []).map(({ name }) => ({ value: name, label: name })),
    { value: "score", label: "score, slowest first" },
  ];
}
export const ROWS = [
  { value: "rank", label: "ranks" },
  { value: "host", label: "hosts" },
];

function known(value: string, options: readonly { value: string }[], fallback: string): string {
  return options.some((option) => option.value === value) ? value : fallback;
}

export interface HeatChoice {
  operation: string;
  measure: string;
  scale: string;
  by: string;
  order: string;
  set: (name: "operation" | "measure" | "scale" | "by" | "order", value: string) => void;
}

const DEFAULT_OPERATION = "forward-compute";

/** Return the current selection; a component that calls this is drawn again when the selection changes. */
export function useHeatChoice(): HeatChoice {
  const [operation, setOperation] = useParam("operation", DEFAULT_OPERATION);
  const [measure, setMeasure] = useParam("measure", "sum");
  const [scale, setScale] = useParam("scale", "relative");
  const [by, setBy] = useParam("by", "rank");
  const [order, setOrder] = useParam("order", "rank");
  const setters = { operation: setOperation, measure: setMeasure, scale: setScale, by: setBy, order: setOrder };
  const operations = (job.value?.operations ?? []).map((one) => ({ value: one.name }));
  const subjects = [...operations, ...DEVICE_METRICS];
  return {
    operation: operations.length === 0 ? operation : known(operation, subjects, DEFAULT_OPERATION),
    measure: known(measure, MEASURES, "sum"),
    scale: known(scale, SCALES, "relative"),
    by: known(by, ROWS, "rank"),
    order: operations.length === 0 ? order : known(order, orders(), "rank"),
    set: (name, value) => setters[name](value),
  };
}

/** Whether the selected metric is one of GPUs or links, which have no measures. */
export function isOfDevices(choice: HeatChoice): boolean {
  return DEVICE_METRICS.some((one) => one.value === choice.operation);
}

/** Return the parameters that select cells, as for /heat/cell and /heat/outliers. */
export function cellsQuery(choice: HeatChoice): Query {
  return {
    round: shownRound.value?.number,
    operation: choice.operation,
    measure: choice.measure,
    ...rangeQuery(),
  };
}

export function pictureQuery(choice: HeatChoice): Query {
  return { ...cellsQuery(choice), scale: choice.scale, by: choice.by, sort: choice.order };
}
