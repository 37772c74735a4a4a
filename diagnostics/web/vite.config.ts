// The build: one script, one style sheet, one page, with hashes of their contents in their names. The same sources and
// packages give the same bytes.

import { readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const STATIC = "../megatrain_dashboard/static";

// The packages in the bundle. Their licences require that the licence texts are distributed with them.
const BUNDLED = ["preact", "@preact/signals", "@preact/signals-core", "uplot"];

function licences(): Plugin {
  return {
    name: "licences",
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
  plugins: [licences()],
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
