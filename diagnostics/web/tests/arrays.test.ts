// The container of arrays, with the same bytes as the server writes in tests/unit/dashboard/test_dashboard_binary.py.

import assert from "node:assert/strict";
import { test } from "node:test";

import { readArrays } from "../src/canvas/arrays.ts";

function container(header: unknown, data: number[]): ArrayBuffer {
  let text = JSON.stringify(header);
  while ((8 + text.length) % 8 !== 0) {
    text += " ";
  }
  const head = new TextEncoder().encode(text);
  const buffer = new ArrayBuffer(8 + head.length + data.length);
  const bytes = new Uint8Array(buffer);
  bytes.set(new TextEncoder().encode("MTA1"));
  new DataView(buffer).setUint32(4, head.length, true);
  bytes.set(head, 8);
  bytes.set(data, 8 + head.length);
  return buffer;
}

const HEADER = {
  unit: "s",
  arrays: [
    { name: "a", dtype: "i4", shape: [2], offset: 0, bytes: 8 },
    { name: "b", dtype: "u1", shape: [1, 1], offset: 8, bytes: 1 },
  ],
};
const DATA = [1, 0, 0, 0, 2, 1, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];

test("arrays are views of the received buffer", () => {
  const buffer = container(HEADER, DATA);
  const found = readArrays(buffer);

  assert.deepEqual(found.fields, { unit: "s" });
  assert.deepEqual([...found.integers("a")], [1, 258]);
  assert.deepEqual([...found.bytes("b")], [7]);
  assert.deepEqual(found.shape("b"), [1, 1]);
  assert.equal(found.integers("a").buffer, buffer);
});

test("a truncated or foreign answer is an error", () => {
  const whole = container(HEADER, DATA);

  assert.throws(() => readArrays(new ArrayBuffer(3)), /truncated/);
  assert.throws(() => readArrays(whole.slice(0, whole.byteLength - 12)), /truncated/);
  assert.throws(() => readArrays(whole.slice(0, 30)), /truncated/);
  assert.throws(() => readArrays(new TextEncoder().encode("<!DOCTYPE html>").buffer as ArrayBuffer), /not a container/);
  assert.throws(() => readArrays(container({ arrays: [{ name: "a", dtype: "i8", shape: [], offset: 0, bytes: 8 }] }, DATA)), /i8/);
});

test("a missing array, or one of another type, is an error", () => {
  const found = readArrays(container(HEADER, DATA));

  assert.throws(() => found.doubles("a"), /no array a of Float64Array/);
  assert.throws(() => found.bytes("c"), /no array c/);
});
