// Builds src/ into the one file that the server sends: its script and its style stand in it, and it loads nothing.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const here = path => fileURLToPath(new URL(path, import.meta.url));
const OUT = here("../src/penstock/server/page.html");
const MOST = 300_000; // bytes
const BUNDLED = ["preact", "marked", "lowlight", "highlight.js"];

const common = { bundle: true, minify: true, write: false, charset: "utf8", legalComments: "none", logLevel: "warning" };
const [script, style] = await Promise.all([
  esbuild.build({ ...common, entryPoints: [here("src/main.tsx")], format: "iife", target: "es2022" }),
  esbuild.build({ ...common, entryPoints: [here("src/style.css")], target: "es2022" }),
]);

/** A hash of what the page is made of: a test compares it with the files, where there is no npm. */
function source() {
  const names = ["build.mjs", "package-lock.json", "tsconfig.json", ...readdirSync(here("src")).map(each => `src/${each}`)];
  const hash = createHash("sha256");
  for (const name of names.sort()) hash.update(`${name}\0`).update(readFileSync(here(name))).update("\0");
  return hash.digest("hex");
}

function notices() {
  return BUNDLED.map(name => {
    const folder = here(`node_modules/${name}/`);
    const { version, license } = JSON.parse(readFileSync(`${folder}package.json`, "utf8"));
    const file = ["LICENSE", "LICENSE.md", "license"].find(each => readable(folder + each));
    return `${name} ${version} (${license})\n\n${readFileSync(folder + file, "utf8").trim()}`;
  }).join("\n\n\n").replaceAll("--", "- -"); // a comment must not contain two hyphens
}

function readable(path) {
  try {
    readFileSync(path);
    return true;
  } catch {
    return false;
  }
}

const text = result => result.outputFiles[0].text.trim();
const page = readFileSync(here("src/page.html"), "utf8")
  .replace("SOURCE", () => source())
  .replace("NOTICES", () => notices())
  .replace("STYLE", () => text(style))
  .replace("SCRIPT", () => text(script));
const size = Buffer.byteLength(page);
if (size > MOST) throw new Error(`the page has ${size} bytes; the limit is ${MOST}`);
writeFileSync(OUT, page);
console.log(`${size} bytes`);
