// Where the tiles of conv2d_hopper.cu lie: a part of that file, included where its structures are known.
#pragma once

// The channels that a block sums.
struct Stretch {
    int begin = 0, end;

    __device__ __forceinline__ Stretch(const Problem& p) : end(p.depth) {
        if constexpr (PARTS > 1) {
            const int stages = ceil_div(p.depth, DEPTH), part = cluster_rank();
            begin = stages * part / PARTS * DEPTH, end = min(stages * (part + 1) / PARTS * DEPTH, p.depth);
        }
    }

    // Whether the last ones are among them.
    __device__ __forceinline__ bool ends(const Problem& p) const { return PARTS == 1 || end == p.depth; }
};

// One tile of the output.
struct Tile : Stretch {
    int index;  // of its class
    int row, column;
    int source = 0;  // of the source, where its channels begin

    __device__ __forceinline__ Tile(const Problem& p, int tile) : Stretch(p), index(0) {
        if constexpr (PARTS > 1) tile /= PARTS;
        if constexpr (SPREAD) tile = within_class(p, tile);
        const int m = tile / p.tiles_n;
        column = (tile - m * p.tiles_n) * TILE_N;
        row = m * TILE_M;
        if constexpr (GROUPED) source = column / p.group_columns * p.depth;
    }

    // As the thread that fills tells of it.
    __device__ __forceinline__ Tile(const Problem& p, const Ticket& ticket)
        : Stretch(p), index(SPREAD ? ticket.second >> 28 : 0), row(ticket.first), column(ticket.second & 0xfffffff) {}
    __device__ __forceinline__ Ticket ticket() const { return {row, SPREAD ? column | index << 28 : column}; }

    // What this block finishes of it.
    __device__ __forceinline__ Tile own() const {
        Tile tile = *this;
        if constexpr (CUT > 1) tile.column += cluster_rank() * OWN;
        return tile;
    }

    // Which tile of a class it is. Rounds of a group of blocks go through the classes that have taps, as long as all of
    // them do, so that what they have in common is read once; what is left follows class by class.
    __device__ __forceinline__ int within_class(const Problem& p, int tile) {
        const int round = tile / p.group, cycle = round / p.count, done = p.cycles * p.group;
        if (cycle < p.cycles) {
            index = round - cycle * p.count;
            tile += (cycle - round) * p.group;
        } else {
            const auto left = [&] { return p.classes[index].tiles * p.tiles_n - (index < p.count ? done : 0); };
            tile -= done * p.count;
            while (tile >= left()) tile -= left(), ++index;
            if (index < p.count) tile += done;
        }
        return tile;
    }

    // Which rows it has, of all classes.
    __device__ __forceinline__ int rows(const Problem& p) const {
        int m = row / TILE_M;
        for (int i = 0; SPREAD && i < index; ++i) m += p.classes[i].tiles;
        return m;
    }
};

struct Pixel {
    int image, y, x;

    __device__ __forceinline__ Pixel() {}
    __device__ __forceinline__ Pixel(const Class& c, int row) {
        const int line = row / c.width;
        x = row - line * c.width;
        image = line / c.height;
        y = line - image * c.height;
    }

    __device__ __forceinline__ void advance(const Class& c, int pixels) {
        x += pixels;
        while (x >= c.width) x -= c.width, ++y;
        while (y >= c.height) y -= c.height, ++image;
    }
};
