package runedge

import "testing"

func TestReadySlots(t *testing.T) {
	for want, c := range map[int]Server{8: {}, 3: {ReadySlots: 3}} {
		if got := c.readySlots(); got != want {
			t.Errorf("ready_slots of %d keeps %d ready, want %d", c.ReadySlots, got, want)
		}
	}
}
