// Colors of pictures, computed instead of stored in tables.
//
// The sequential map is a straight line in OKLab, a perceptually uniform space, from dark blue to light yellow. Its lightness
// increases evenly, so it works in gray scale, and nearly all kinds of color blindness preserve the blue-yellow axis
// (the idea of cividis: Nunez, Anderton, Renslow, PLoS ONE 2018). OKLab: B. Ottosson, 2020.

export type Triple = readonly [number, number, number];

/** Return a color in OKLab as sRGB, 0 to 255, with channels outside of sRGB clipped. */
export function srgbOfOklab(lightness: number, a: number, b: number): Triple {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    encoded(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    encoded(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    encoded(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

function encoded(linear: number): number {
  const inside = Math.min(1, Math.max(0, linear));
  const value = inside <= 0.0031308 ? 12.92 * inside : 1.055 * inside ** (1 / 2.4) - 0.055;
  return Math.round(255 * value);
}

/** The same from lightness, chroma and hue in degrees. */
export function srgbOfOklch(lightness: number, chroma: number, hue: number): Triple {
  const angle = (hue * Math.PI) / 180;
  return srgbOfOklab(lightness, chroma * Math.cos(angle), chroma * Math.sin(angle));
}

/** Return a pixel of ImageData as one number: little endian, so the bytes in memory are red, green, blue, alpha. */
export function packed([red, green, blue]: Triple, alpha = 255): number {
  return ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

export function cssOf([red, green, blue]: Triple, alpha = 1): string {
  return alpha === 1 ? `rgb(${red} ${green} ${blue})` : `rgb(${red} ${green} ${blue} / ${alpha})`;
}

const DARKEST: Triple = [0.26, -0.012, -0.088];
const LIGHTEST: Triple = [0.92, -0.035, 0.15];

/** Return the color at a position (0 to 1) of the sequential map. */
export function sequential(part: number): Triple {
  const at = Math.min(1, Math.max(0, part));
  const mixed = DARKEST.map((from, place) => from + ((LIGHTEST[place] ?? 0) - from) * at);
  return srgbOfOklab(mixed[0] ?? 0, mixed[1] ?? 0, mixed[2] ?? 0);
}

export type Theme = "light" | "dark";

/** A position on a map, 0 to 1, and its color in OKLab. */
type Stop = readonly [at: number, lightness: number, a: number, b: number];

/**
 * The map for comparison with peers. Differences that may be chance are an inconspicuous gray; larger ones go through
 * amber to red. Lightness is monotonic (decreasing; in the dark theme increasing), so the map works in gray scale. The server
 * sets the limits so that the range of chance ends in the middle (analysis/heat_scale.py).
 */
const PEER_STOPS: Record<Theme, readonly Stop[]> = {
  light: [
    [0, 0.955, -0.004, -0.016],
    [0.2, 0.935, -0.002, -0.006],
    [0.5, 0.885, 0.002, 0.018],
    [0.75, 0.73, 0.055, 0.125],
    [1, 0.47, 0.155, 0.085],
  ],
  dark: [
    [0, 0.25, -0.006, -0.024],
    [0.2, 0.275, -0.003, -0.008],
    [0.5, 0.34, 0.004, 0.018],
    [0.75, 0.62, 0.08, 0.105],
    [1, 0.9, -0.02, 0.11],
  ],
};

/** Return the color at a position (0 to 1) of the map for comparison with peers; up to 0.5 the difference may be chance. */
export function againstPeers(part: number, theme: Theme): Triple {
  const at = Math.min(1, Math.max(0, part));
  const stops = PEER_STOPS[theme];
  const next = Math.max(1, stops.findIndex((stop) => stop[0] >= at));
  const [from, to] = [stops[next - 1] as Stop, stops[next] as Stop];
  const share = (at - from[0]) / (to[0] - from[0]);
  const between = (place: 1 | 2 | 3): number => from[place] + (to[place] - from[place]) * share;
  return srgbOfOklab(between(1), between(2), between(3));
}

/** Return the pixel of each of `levels` levels of a map. */
export function mapTable(levels: number, colorAt: (part: number) => Triple): Uint32Array {
  return Uint32Array.from({ length: levels }, (_, level) => packed(colorAt(level / Math.max(1, levels - 1))));
}

/** Return the map of a scale of the heat map: the sequential map for absolute values, else the one for comparison with peers. */
export function mapOf(scale: string, theme: Theme): (part: number) => Triple {
  return scale === "absolute" ? sequential : (part) => againstPeers(part, theme);
}

/** Return an sRGB triple of "#rgb", "#rrggbb" or "#rrggbbaa". Canvas pixels need design tokens as numbers. */
export function tripleOfHex(text: string): Triple {
  const digits = text.trim().replace(/^#/, "");
  const wide = digits.length < 6 ? [...digits].map((digit) => digit + digit).join("") : digits;
  const value = Number.parseInt(wide.slice(0, 6), 16);
  return Number.isNaN(value) ? [128, 128, 128] : [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}

// Hue, chroma and change of lightness of each operation. Compute is blue or violet, communication orange, pink or green, data
// yellow, checkpoints cyan, garbage collection red, and the rest nearly gray. Operations of one family have a similar hue.
const OPERATION_COLORS: Record<string, readonly [number, number, number]> = {
  "forward-compute": [255, 0.12, 0],
  "backward-compute": [255, 0.12, -0.13],
  "backward-weight-compute": [235, 0.1, 0.09],
  "optimizer": [285, 0.11, -0.03],
  "clip": [285, 0.09, 0.07],
  "forward-send": [75, 0.12, 0.06],
  "forward-recv": [75, 0.12, -0.06],
  "backward-send": [45, 0.13, 0.02],
  "backward-recv": [45, 0.13, -0.1],
  "pp-all-reduce": [60, 0.1, -0.14],
  "embedding-all-reduce": [60, 0.09, 0.1],
  "tp-all-gather": [330, 0.11, 0.05],
  "tp-reduce-scatter": [330, 0.11, -0.04],
  "tp-all-reduce": [330, 0.11, -0.12],
  "params-all-gather": [160, 0.1, 0.05],
  "grads-reduce-scatter": [160, 0.11, -0.07],
  "dp-all-reduce": [140, 0.1, -0.02],
  "data-wait": [110, 0.1, 0.06],
  "data-read": [110, 0.08, -0.06],
  "picture-wait": [90, 0.09, 0.05],
  "picture-requests": [90, 0.08, -0.06],
  "gc": [25, 0.16, 0],
  "checkpoint": [200, 0.07, 0],
  "checkpoint-load": [200, 0.07, -0.08],
  "checkpoint-exchange": [200, 0.07, 0.08],
  "evaluation": [220, 0.05, 0.04],
  "barrier": [60, 0.03, -0.06],
  "checksum": [60, 0.03, 0.06],
  "step": [255, 0.008, 0.06],
  "init": [255, 0.01, -0.06],
};
const LIGHTNESS: Record<Theme, number> = { light: 0.66, dark: 0.62 };
const UNKNOWN_OPERATION = [0, 0, -0.04] as const;

/** Return the color of an operation; unknown operations are gray. */
export function operationColor(name: string, theme: Theme): Triple {
  const [hue, chroma, lighter] = OPERATION_COLORS[name] ?? UNKNOWN_OPERATION;
  return srgbOfOklch(LIGHTNESS[theme] + lighter, chroma, hue);
}

/** Return the relative luminance as defined by WCAG, 0 to 1. */
export function luminance(color: Triple): number {
  const [red, green, blue] = color.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * (red ?? 0) + 0.7152 * (green ?? 0) + 0.0722 * (blue ?? 0);
}

const INK_DARK: Triple = [0, 0, 0];
const INK_LIGHT: Triple = [255, 255, 255];

// At this luminance black and white have the same contrast, 4.58:1, which is the lowest contrast of any text.
const MIDDLE_LUMINANCE = 0.179;

/** Return black or white, whichever has the higher contrast to a color. */
export function inkOn(color: Triple): Triple {
  return luminance(color) > MIDDLE_LUMINANCE ? INK_DARK : INK_LIGHT;
}

/** Return a mix of two colors; part 0 is the first. */
export function mixed(from: Triple, to: Triple, part: number): Triple {
  return [0, 1, 2].map((place) => Math.round((from[place] ?? 0) * (1 - part) + (to[place] ?? 0) * part)) as unknown as Triple;
}
