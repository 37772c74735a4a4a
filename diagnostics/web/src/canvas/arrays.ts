// The container "MTA1" of pictures: a JSON header and typed arrays. The arrays are views of the received buffer, not copies.
//
// Layout: "MTA1", u32 length of the header, header, arrays, each on a multiple of 8 bytes. Written by
// megatrain_dashboard/responses/binary.py.

export type NumberArray = Uint8Array | Int32Array | Float32Array | Float64Array;

interface Listed {
  name: string;
  dtype: string;
  shape: number[];
  offset: number;
  bytes: number;
}

export class Arrays {
  /** The other fields of the header, as the server wrote them. */
  readonly fields: Record<string, unknown>;
  private readonly found: Map<string, NumberArray>;
  private readonly shapes: Map<string, number[]>;

  constructor(fields: Record<string, unknown>, found: Map<string, NumberArray>, shapes: Map<string, number[]>) {
    this.fields = fields;
    this.found = found;
    this.shapes = shapes;
  }

  shape(name: string): number[] {
    const shape = this.shapes.get(name);
    if (shape === undefined) {
      throw new Error(`the answer has no array ${name}`);
    }
    return shape;
  }

  bytes(name: string): Uint8Array {
    return this.of(name, Uint8Array);
  }

  integers(name: string): Int32Array {
    return this.of(name, Int32Array);
  }

  singles(name: string): Float32Array {
    return this.of(name, Float32Array);
  }

  doubles(name: string): Float64Array {
    return this.of(name, Float64Array);
  }

  /** Return a list of texts of the header; empty if it has none of this name. */
  texts(name: string): string[] {
    const value = this.fields[name];
    return Array.isArray(value) ? value.map(String) : [];
  }

  private of<T extends NumberArray>(name: string, kind: new (size: number) => T): T {
    const array = this.found.get(name);
    if (!(array instanceof kind)) {
      throw new Error(`the answer has no array ${name} of ${kind.name}`);
    }
    return array;
  }
}

const MAGIC = 0x3141544d; // "MTA1", read as a little-endian number
const HEAD_BYTES = 8;

function makeArray(dtype: string, buffer: ArrayBuffer, begin: number, bytes: number): NumberArray {
  switch (dtype) {
    case "u1":
      return new Uint8Array(buffer, begin, bytes);
    case "i4":
      return new Int32Array(buffer, begin, bytes / 4);
    case "f4":
      return new Float32Array(buffer, begin, bytes / 4);
    case "f8":
      return new Float64Array(buffer, begin, bytes / 8);
    default:
      throw new Error(`the answer has an array of unknown type ${dtype}; reload the page, since the server may be newer`);
  }
}

function isListed(value: unknown): value is Listed {
  const one = value as Partial<Listed> | null;
  return typeof one === "object" && one !== null && typeof one.name === "string" && typeof one.dtype === "string"
    && Array.isArray(one.shape) && typeof one.offset === "number" && typeof one.bytes === "number";
}

/** Read a container. Throws an Error for anything else, so that a truncated answer is never drawn. */
export function readArrays(buffer: ArrayBuffer): Arrays {
  if (buffer.byteLength < HEAD_BYTES) {
    throw new Error("the answer is truncated");
  }
  const head = new DataView(buffer);
  if (head.getUint32(0, true) !== MAGIC) {
    throw new Error("the answer is not a container of arrays");
  }
  const begin = HEAD_BYTES + head.getUint32(4, true);
  if (begin > buffer.byteLength) {
    throw new Error("the answer is truncated");
  }
  const text = new TextDecoder().decode(new Uint8Array(buffer, HEAD_BYTES, begin - HEAD_BYTES));
  const { arrays, ...fields } = JSON.parse(text) as Record<string, unknown>;
  const found = new Map<string, NumberArray>();
  const shapes = new Map<string, number[]>();
  for (const one of Array.isArray(arrays) ? arrays : []) {
    if (!isListed(one) || begin + one.offset + one.bytes > buffer.byteLength) {
      throw new Error("the answer is truncated");
    }
    found.set(one.name, makeArray(one.dtype, buffer, begin + one.offset, one.bytes));
    shapes.set(one.name, one.shape);
  }
  return new Arrays(fields, found, shapes);
}
