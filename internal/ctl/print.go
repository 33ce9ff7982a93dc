package ctl

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// printJSON prints a message of the API as the API gives it.
func (a *App) printJSON(m proto.Message) error {
	b, err := protojson.Marshal(m)
	if err != nil {
		return fmt.Errorf("print as JSON: %w", err)
	}
	// protojson varies its spaces from build to build; json does not.
	return a.writeJSON(json.RawMessage(b))
}

// writeJSON prints a value as indented JSON.
func (a *App) writeJSON(v any) error {
	enc := json.NewEncoder(a.Stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// done ends a command whose answer says nothing: it is silent, but for the
// id with -q and the answer with -o json.
func (a *App) done(m proto.Message, id string) error {
	if a.output == "table" && !a.quiet {
		return nil
	}
	return a.fields(m, id, nil)
}

// list is what a listing command prints, in each of the three ways.
type list struct {
	message proto.Message // for -o json
	head    []string
	rows    [][]string // the first column is the id, for -q
}

func (a *App) print(l list) error {
	if a.output == "json" {
		return a.printJSON(l.message)
	}
	if a.quiet {
		for _, r := range l.rows {
			fmt.Fprintln(a.Stdout, r[0])
		}
		return nil
	}
	return table(a.Stdout, l.head, l.rows)
}

func table(w io.Writer, head []string, rows [][]string) error {
	var out bytes.Buffer
	tw := tabwriter.NewWriter(&out, 0, 0, 3, ' ', 0)
	for _, r := range append([][]string{head}, rows...) {
		for i, cell := range r {
			if i > 0 {
				fmt.Fprint(tw, "\t")
			}
			fmt.Fprint(tw, printable(cell))
		}
		fmt.Fprintln(tw)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(out.String()) {
		if _, err := fmt.Fprintln(w, strings.TrimRight(line, " \n")); err != nil {
			return err
		}
	}
	return nil
}

// printable keeps what others wrote from moving the cursor or breaking a table.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}

// fields prints one thing, each of its properties that has a value; a value of
// several lines has its lines below each other.
func (a *App) fields(m proto.Message, id string, pairs [][2]string) error {
	switch {
	case a.output == "json":
		return a.printJSON(m)
	case a.quiet:
		_, err := fmt.Fprintln(a.Stdout, id)
		return err
	}
	tw := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
	for _, p := range pairs {
		if p[1] != "" {
			for i, line := range strings.Split(p[1], "\n") {
				name := p[0]
				if i > 0 {
					name = ""
				}
				fmt.Fprintf(tw, "%s\t%s\n", name, printable(line))
			}
		}
	}
	return tw.Flush()
}

func stamp(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().Local().Format("2006-01-02 15:04:05")
}

// age returns how long ago t was, in the largest unit that fits.
func age(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	d := time.Since(t.AsTime())
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// mib prints an amount of MiB.
func mib(n int64) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f TB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f GB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d MB", n)
}

// word returns an enum's value as people write it: STATE_RUNNING is RUNNING.
func word(e fmt.Stringer, prefix string) string {
	return strings.TrimPrefix(e.String(), prefix)
}
