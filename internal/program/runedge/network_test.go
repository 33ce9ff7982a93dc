package runedge

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
)

func TestNetworkFaults(t *testing.T) {
	for want, n := range map[string]Network{
		"":               {},
		"network.dns":    {DNS: []string{"192.0.2.53", "resolver"}},
		"203.0.113.1/24": {Never: []string{"203.0.113.0/24", "203.0.113.1/24"}},
		"::ffff:0:0/96":  {Never: []string{"::ffff:0:0/96"}},
		"negative":       {BandwidthMbit: -1},
	} {
		err := errors.Join(n.faults()...)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", n, err)
		}
	}
	g, err := Network{DNS: []string{"192.0.2.53:5353"}, Never: []string{"203.0.113.0/24"}}.open(slog.New(slog.DiscardHandler))
	if err != nil || g == nil {
		t.Error(err)
	}
}
