// Tables: aligned numbers, sortable by column (the order is in the URL), with only visible rows in the document. If the columns
// do not fit, rows become blocks.

import type { ComponentChildren, JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";

import { useParam } from "../app/location";
import { useBlocks } from "./blocks";
import { Chevron } from "./icons";
import { usePixels, useWindow } from "./virtual";

export interface Column<Row> {
  key: string;
  label: string;
  /** Numbers are right-aligned. */
  isNumber?: boolean;
  /** The sort key; a column without it is not sortable. Null comes last in both directions. */
  sort?: (row: Row) => number | string | null;
  render: (row: Row) => ComponentChildren;
  title?: string;
  /** A class for its cells: "wide" takes the remaining width, "clip" truncates long text. */
  className?: string;
}

interface TableProps<Row> {
  /** The content of the table, for screen readers. */
  caption: string;
  columns: readonly Column<Row>[];
  rows: readonly Row[];
  rowKey: (row: Row) => string;
  /** "key" or "-key" (descending). Without it the rows keep their order. */
  defaultSort?: string;
  /** The URL parameter of the order; two tables in one view need different ones. */
  sortParam?: string;
  isChosen?: (row: Row) => boolean;
  rowClass?: (row: Row) => string;
  /** From this number of rows on, only visible rows are drawn and the table scrolls by itself. */
  virtualFrom?: number;
}

function compared(a: number | string | null, b: number | string | null, isDescending: boolean): number {
  if (a === null || b === null) {
    return a === b ? 0 : a === null ? 1 : -1;
  }
  const order =
    typeof a === "string" && typeof b === "string" ? a.localeCompare(b, "en", { numeric: true }) : a < b ? -1 : a > b ? 1 : 0;
  return isDescending ? -order : order;
}

/** Return the rows sorted by an order such as "-step"; the sort is stable. */
export function sortedRows<Row>(rows: readonly Row[], columns: readonly Column<Row>[], order: string): readonly Row[] {
  const isDescending = order.startsWith("-");
  const key = isDescending ? order.slice(1) : order;
  const value = columns.find((column) => column.key === key)?.sort;
  if (value === undefined) {
    return rows;
  }
  return rows
    .map((row) => ({ row, value: value(row) }))
    .sort((a, b) => compared(a.value, b.value, isDescending))
    .map((pair) => pair.row);
}

interface HeadProps<Row> {
  column: Column<Row>;
  order: string;
  setOrder: (order: string) => void;
}

function Head<Row>({ column, order, setOrder }: HeadProps<Row>): JSX.Element {
  const isAscending = order === column.key;
  const isDescending = order === `-${column.key}`;
  const className = [column.isNumber === true ? "number" : "", column.className ?? ""].join(" ").trim();
  if (column.sort === undefined) {
    return (
      <th scope="col" class={className} title={column.title}>
        {column.label}
      </th>
    );
  }
  // The first click sorts numbers descending and names ascending.
  const first = column.isNumber === true ? `-${column.key}` : column.key;
  const second = column.isNumber === true ? column.key : `-${column.key}`;
  return (
    <th
      scope="col"
      class={className}
      title={column.title}
      aria-sort={isAscending ? "ascending" : isDescending ? "descending" : "none"}
    >
      <button type="button" class="sort" onClick={() => setOrder(order === first ? second : first)}>
        {column.label}
        {isAscending || isDescending ? <Chevron isUp={isAscending} /> : null}
      </button>
    </th>
  );
}

const ROW_REM = 1.75;

export function Table<Row>(props: TableProps<Row>): JSX.Element {
  const { caption, columns, rows, rowKey, isChosen, rowClass, virtualFrom = 150 } = props;
  const [order, setOrder] = useParam(props.sortParam ?? "sort", props.defaultSort ?? "");
  const sorted = useMemo(() => sortedRows(rows, columns, order), [rows, columns, order]);
  const box = useRef<HTMLDivElement>(null);
  const rowHeight = usePixels(ROW_REM);
  const isVirtual = sorted.length >= virtualFrom;
  const seen = useWindow(box, sorted.length, rowHeight);
  useBlocks(box, !isVirtual);
  const shown = isVirtual ? sorted.slice(seen.first, seen.last) : sorted;
  const start = isVirtual ? seen.first : 0;

  return (
    <div
      class={isVirtual ? "table-box is-virtual" : "table-box"}
      ref={box}
      tabIndex={isVirtual ? 0 : undefined}
      role={isVirtual ? "region" : undefined}
      aria-label={isVirtual ? caption : undefined}
    >
      <table aria-rowcount={isVirtual ? sorted.length + 1 : undefined}>
        <caption class="visually-hidden">{caption}</caption>
        <thead>
          <tr>
            {columns.map((column) => (
              <Head key={column.key} column={column} order={order} setOrder={setOrder} />
            ))}
          </tr>
        </thead>
        <tbody>
          {isVirtual && seen.before > 0 ? <Gap height={seen.before} columns={columns.length} /> : null}
          {shown.map((row, index) => (
            <tr
              key={rowKey(row)}
              class={rowClass?.(row)}
              aria-current={isChosen?.(row) === true ? "true" : undefined}
              aria-rowindex={isVirtual ? start + index + 2 : undefined}
            >
              {columns.map((column) => (
                <td
                  key={column.key}
                  class={`${column.isNumber === true ? "number " : ""}${column.className ?? ""}`.trim()}
                  data-column={column.label}
                >
                  {column.render(row)}
                </td>
              ))}
            </tr>
          ))}
          {isVirtual && seen.after > 0 ? <Gap height={seen.after} columns={columns.length} /> : null}
        </tbody>
      </table>
    </div>
  );
}

function Gap({ height, columns }: { height: number; columns: number }): JSX.Element {
  return (
    <tr aria-hidden="true" class="gap">
      <td colSpan={columns} style={{ height: `${height}px` }} />
    </tr>
  );
}
