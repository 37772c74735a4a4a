// Where the page begins.

import { render } from "preact";

import "uplot/dist/uPlot.min.css";
import "./ui/tokens.css";
import "./ui/base.css";
import "./ui/layout.css";
import "./ui/controls.css";
import "./ui/components.css";
import "./ui/pictures.css";
import "./ui/views.css";

import { startJob } from "./app/job";
import { startKeyboard } from "./app/keyboard";
import { Shell } from "./app/shell";

const root = document.getElementById("root");
if (root !== null) {
  startKeyboard();
  startJob();
  render(<Shell />, root);
}
