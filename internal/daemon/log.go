package daemon

import (
	"fmt"
	"io"
	"log/slog"
)

// Logger returns a component's logger: lines of key=value, times in UTC. The
// level is "debug", "info" (also for ""), "warn" or "error".
func Logger(w io.Writer, component, level string) (*slog.Logger, error) {
	var l slog.Level
	if level != "" {
		if err := l.UnmarshalText([]byte(level)); err != nil {
			return nil, fmt.Errorf("log level %q: want debug, info, warn or error", level)
		}
	}
	h := slog.NewTextHandler(w, &slog.HandlerOptions{Level: l, ReplaceAttr: utc})
	return slog.New(h).With("component", component), nil
}

func utc(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && a.Key == slog.TimeKey && a.Value.Kind() == slog.KindTime {
		a.Value = slog.TimeValue(a.Value.Time().UTC())
	}
	return a
}
