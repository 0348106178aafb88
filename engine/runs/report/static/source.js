// Where the page's data comes from: from the page itself, or from the server of `zerokl watch`.
// Rollouts lie in blocks of rows: an index (numbers, to sort and filter by) and texts (unpacked when shown).

async function gunzip(buffer) {
  const stream = new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const embedded = {
  live: false,
  async get(name) {
    const element = document.getElementById(name);
    if (!element) return null;
    const binary = atob(element.textContent);
    const buffer = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i += 1) buffer[i] = binary.charCodeAt(i);
    return gunzip(buffer);
  },
};

const served = {
  live: true,
  // The token is in the address of the page, and goes back in a header.
  token: new URLSearchParams(location.search).get("token") || "",
  async get(name) {
    const answer = await fetch(`data/${name}`, { headers: { "X-Zerokl-Token": this.token }, cache: "no-store" });
    if (!answer.ok) return null;
    return gunzip(await answer.arrayBuffer());
  },
};

const source = document.getElementById("live") ? served : embedded;
const BLOCK_ROWS = 1024;  // as in rollouts.py
const COLUMNS = ["step", "prompt", "sample", "reward", "advantage", "length", "cut", "logprob", "mismatch"];
// JSON has no infinities: their names stand for them.
const fromJson = (x) => (typeof x === "string" ? Number(x) : x);
const pause = () => new Promise((resolve) => { setTimeout(resolve); });

// The rollouts of one run. `rows` is the number of rows that are known here.
class Rollouts {
  constructor(run) {
    this.run = run;
    this.columns = Object.fromEntries(COLUMNS.map((name) => [name, []]));
    this.firsts = [];  // first row of each block
    this.rows = 0;
    this.texts = new Map();
    this.reading = null;
  }

  // Read the index until all `wanted` rows are known. progress(share) is called now and then.
  read(wanted, progress) {
    this.reading = (this.reading || Promise.resolve()).then(() => this.readOn(wanted, progress));
    return this.reading;
  }

  async readOn(wanted, progress) {
    while (this.rows < wanted) {
      // The last block may have grown since, so it is read again.
      const last = this.firsts.length - 1;
      const grows = last >= 0 && (this.rows - this.firsts[last]) % BLOCK_ROWS !== 0;
      const block = grows ? last : last + 1;
      const columns = await source.get(`index-${this.run}-${block}`);
      if (!columns) return;
      const first = grows ? this.firsts[last] : this.rows;
      for (const name of COLUMNS) {
        this.columns[name].length = first;
        for (const value of columns[name]) this.columns[name].push(fromJson(value));
      }
      this.firsts[block] = first;
      this.texts.delete(block);
      if (this.columns.step.length === this.rows) return;
      this.rows = this.columns.step.length;
      if (progress) progress(this.rows / wanted);
      await pause();
    }
  }

  // The texts of the block that holds a row, and the row's place in it.
  async text(row) {
    const block = this.firsts.findLastIndex((first) => first <= row);
    if (!this.texts.has(block)) {
      if (this.texts.size > 24) this.texts.delete(this.texts.keys().next().value);
      this.texts.set(block, source.get(`texts-${this.run}-${block}`));
    }
    return [await this.texts.get(block), row - this.firsts[block]];
  }
}
