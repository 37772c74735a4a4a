// The build: one script, one style sheet, one page, with hashes of their contents in their names. The same sources and
// packages give the same bytes.

import { readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const STATIC = "../megatrain_dashboard/static";

// The packages in the bundle. Their licenses require that the license texts are distributed with them.
const BUNDLED = ["preact", "@preact/signals", "@preact/signals-core", "uplot"];

function licenses(): Plugin {
  return {
    name: "licenses",
    generateBundle() {
      const parts = BUNDLED.map((name) => {
        const text = readFileSync(new URL(`node_modules/${name}/LICENSE`, import.meta.url), "utf-8");
        return `${name}\n${"-".repeat(name.length)}\n\n${text.trim()}\n`;
      });
      this.emitFile({ type: "asset", fileName: "LICENSES.txt", source: parts.join("\n\n") });
    },
  };
}

export default defineConfig({
  base: "./", // the page is served below any path
  publicDir: false,
  plugins: [licenses()],
  build: {
    outDir: STATIC,
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    modulePreload: false,
    reportCompressedSize: false,
    sourcemap: false,
  },
});
